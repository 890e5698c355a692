"""The command line. Without the extra ``bench``, only ``bilevel --version`` and ``bilevel doctor`` work."""

import sys
from importlib.util import find_spec

from bilevel._process import fuse_cpu_loops, keep_programs

NEEDED = ("typer", "msgspec", "pandas", "pyarrow")  # by all commands except `doctor`


def main() -> None:
    """Run the command line, with the settings of the process that make JAX fast."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        from bilevel.cli.doctor import answer_without_extras

        sys.exit(answer_without_extras(sys.argv[1:], missing))
    from bilevel.cli.app import app
    from bilevel.cli.terminal import handle_signals

    handle_signals()
    fuse_cpu_loops()
    try:
        keep_programs()
    except PermissionError as error:
        print(f"Compiled programs are not kept: {error}", file=sys.stderr)
    except OSError:  # such as a full disk: each command then compiles its own programs
        pass
    app()
