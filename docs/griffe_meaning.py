"""Let the reference read the library's docstrings as they are meant.

Four things differ from what griffe expects of numpydoc, and this extension puts each right as a package is loaded:

- sections list "name : what it means", types being in the annotations; griffe would take the meaning for a type
- roles, tables and asterisks are those of plain text, not of Markdown
- a solver is made a dataclass by a decorator of its own, so that only Python knows its signature
- what a solver computes is told at the top of its file, and belongs to its class; the decorator adds its parameters
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import griffe

_MEANT = ("Parameters", "Attributes", "Raises")
_ITEM = re.compile(r"(?P<names>(?:\\\*)*\w+(?:, \w+)*) : (?P<meaning>.+)")
_ROLE = re.compile(r":\w+:`~?([\w.]+)`")
_CODE = re.compile(r"(`+.+?`+)", flags=re.DOTALL)
_RULE = re.compile(r"=+( +=+)+")


class Meaning(griffe.Extension):
    """Rewrite docstrings, and ask Python for the signatures of dataclasses."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit a package once it is loaded; docstrings are parsed later, when they are shown."""
        _visit(pkg)


def _visit(obj: griffe.Object) -> None:
    if obj.docstring:
        obj.docstring.value = in_markdown(_docstring(obj))
    if isinstance(obj, griffe.Class) and obj.decorators:
        _sign(obj)
        _tell(obj)
    for member in obj.members.values():
        if not member.is_alias:
            _visit(member)


def _docstring(obj: griffe.Object) -> str:
    """Return the docstring; for solvers, estimators and builders, the one that their decorator has completed."""
    is_class = isinstance(obj, griffe.Class) and (_is_solver(obj) or _has_decorator(obj, "document"))
    if is_class or (isinstance(obj, griffe.Function) and _is_builder(obj)):
        return inspect.getdoc(_known(obj)) or ""
    return obj.docstring.value if obj.docstring else ""


def _is_solver(cls: griffe.Class) -> bool:
    return _has_decorator(cls, "solver")


def _has_decorator(cls: griffe.Class, name: str) -> bool:
    return any(decorator.callable_path.endswith(f".{name}") for decorator in cls.decorators)


def _is_builder(function: griffe.Function) -> bool:
    return any(decorator.callable_path.endswith(".documented") for decorator in function.decorators)


def _known(obj: griffe.Object) -> Any:
    return getattr(import_module(obj.module.path), obj.name)


def _tell(cls: griffe.Class) -> None:
    """Put the text of its file in the place of a solver's first line."""
    top = cls.module.docstring
    if cls.docstring and top and _is_solver(cls):
        _, *sections = cls.docstring.value.split("\n\n", 1)
        cls.docstring.value = "\n\n".join([top.value, *sections])


def in_markdown(text: str) -> str:
    """Return a docstring with meanings below names, and with nothing that Markdown would misread."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n".join(_items("\n\n".join(map(_paragraph, paragraphs)).split("\n")))


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return text
    if _RULE.match(text):
        return re.sub("^", "    ", text, flags=re.MULTILINE)
    text = _ROLE.sub(r'<autoref identifier="\1" optional>`\1`</autoref>', text)
    return "".join(part if part.startswith("`") else part.replace("*", "\\*") for part in _CODE.split(text))


def _items(lines: list[str]) -> Iterator[str]:
    section = ""
    while lines:
        line = lines.pop(0)
        if lines and re.fullmatch("-{3,}", lines[0]):
            section = line
        item = _ITEM.fullmatch(line) if section in _MEANT else None
        if item:
            yield from _item(
                item["names"].replace("\\", "").split(", "), ["    " + item["meaning"], *_continuation(lines)]
            )
        elif section == "Returns" and line.endswith(".") and not line.startswith(" "):
            yield from (":", "    " + line)
        else:
            yield line


def _continuation(lines: list[str]) -> Iterator[str]:
    while lines and lines[0].startswith(" "):
        yield lines.pop(0)


def _item(names: list[str], meaning: list[str]) -> Iterator[str]:
    """Give each name its own entry, for each has its own annotation; a long meaning is told once."""
    for name in names:
        yield name
        yield from meaning if name == names[0] or len(meaning) == 1 else [f"    See `{names[0]}`."]


def _sign(cls: griffe.Class) -> None:
    known = _known(cls)
    if dataclasses.is_dataclass(known):
        cls.set_member("__init__", _init(cls, known))


def _init(cls: griffe.Class, known: Any) -> griffe.Function:
    factories = {field.name: field.default_factory for field in dataclasses.fields(known)}
    parameters = [
        griffe.Parameter(
            name,
            annotation=_shown_annotation(parameter.annotation),
            kind=griffe.ParameterKind(parameter.kind.description),
            default=_shown_default(parameter.default, factories[name]),
        )
        for name, parameter in inspect.signature(known).parameters.items()
    ]
    first = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    return griffe.Function("__init__", parameters=griffe.Parameters(first, *parameters), returns="None", parent=cls)


def _shown_annotation(annotation: Any) -> str:
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", inspect.formatannotation(annotation))


def _shown_default(default: Any, factory: Any) -> str | None:
    if factory is not dataclasses.MISSING:
        return f"{factory.__name__}()"
    return None if default is inspect.Parameter.empty else repr(default)
