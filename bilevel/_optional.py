"""Libraries that are imported when used."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This needs `{module}`: pip install 'bilevel[{extra}]'") from error
