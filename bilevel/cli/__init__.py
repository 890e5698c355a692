"""The command line. Without the extra ``bench`` it tells its version, what is there, and what is missing."""

import sys
from contextlib import suppress
from importlib.util import find_spec

from bilevel._process import fuse_cpu_loops, keep_programs

NEEDED = ("typer", "rich", "msgspec", "pandas", "pyarrow")  # by any command but `doctor`


def main() -> None:
    """Run the command line, with fused loops; before anything is computed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        from bilevel.cli.bare import answer

        sys.exit(answer(sys.argv[1:], missing))
    from bilevel.cli import stops
    from bilevel.cli.app import app

    stops.install()
    fuse_cpu_loops()
    with suppress(OSError):  # a folder that cannot be used: every command compiles its programs itself
        keep_programs()
    app()
