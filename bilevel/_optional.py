"""Libraries that are imported when used."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The error names the module that was not found: `module`, one of its parents, or one that these import.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ImportError(f"This needs `{module}`: pip install 'bilevel[{extra}]'") from error
        raise ImportError(f"`{module}` is installed, but importing it failed: {error}") from error
