"""The command line where its extra is not installed."""

from collections.abc import Sequence

import bilevel
from bilevel._progress import printable
from bilevel.cli import doctor


def answer(words: Sequence[str], missing: Sequence[str]) -> int:
    """Print what was asked for, or which extra it needs, and return the exit code."""
    if list(words) == ["--version"]:
        print(f"bilevel {bilevel.__version__}")
    elif list(words) == ["doctor"]:
        print(printable("\n".join(f"{what}: {found}" for what, found in doctor.examine())))
    else:
        print(
            f"bilevel {bilevel.__version__}: the command line needs {', '.join(missing)}: pip install 'bilevel[bench]'"
        )
        print("Without it there are `bilevel --version` and `bilevel doctor`; the library works as it is.")
        return 0 if list(words) == ["--help"] else 2
    return 0
