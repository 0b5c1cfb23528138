"""The page of public names, as Markdown, from their docstrings: `python -m penstock.api_reference > docs/api.md`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel

import penstock

_HEAD = """# Public names

Made from the docstrings by `python -m penstock.api_reference`; a test keeps it current. All of these names are imported
from `penstock` itself. [From Python](python.md) shows the calls at work, [A loop of your own](own-loop.md) the parts.
"""
_SECTIONS = {
    "load_config": "Runs",
    "RunResult": "Results",
    "RunConfig": "Settings",
    "EmbeddedEngine": "Generation",
    "LocalTrainer": "Training",
    "DataPlaneClient": "Data plane and weights",
    "SingleController": "Controller and staleness",
    "Environment": "Environments",
    "PenstockError": "Errors",
}
"""Headings, by the first name below each."""
_ABOUT = {
    "Runs": """
In the signatures, `Settings` is a `RunConfig`, the path of a YAML file, or the settings as a mapping. `Rewards` is a
reward function, or a list of functions, of `(function, weight)` pairs and of mappings such as
`{"function": f, "batched": True}`. `MakesEnvironment` and `MakesSampler` are classes, or functions that return an
`Environment` or a `StalenessSampler`.
"""
}
"""The text below a heading."""
_WIDTH = 100


def reference() -> str:
    """Every name of `penstock.__all__` with its signature and docstring; classes with their public members."""
    parts = [_HEAD]
    for name in penstock.__all__:
        if name.startswith("__"):
            continue
        if name in _SECTIONS:
            parts.append(f"\n## {_SECTIONS[name]}\n{_ABOUT.get(_SECTIONS[name], '')}")
        parts.append(_entry(name, getattr(penstock, name)))
    return "".join(parts)


def _entry(name: str, thing: Any) -> str:
    parts = [f"### `{name}`"]
    if not inspect.isclass(thing):
        call = "await " * inspect.iscoroutinefunction(thing) + _call(name, thing)
        parts += [_code(call), _text(thing)]
    elif issubclass(thing, BaseModel):
        parts += [f"{_text(thing)} Its fields are [settings](settings.md)."]
    elif hasattr(thing, "from_pretrained"):
        made = thing.from_pretrained
        parts += [_text(thing), _code(_call(f"{name}.from_pretrained", made)), _text(made)]
    elif issubclass(thing, Enum):
        return f"\n{parts[0]}\n\n{_text(thing)} One of {', '.join(f'`{each}`' for each in thing)}.\n"
    elif inspect.isabstract(thing) or _is_protocol(thing) or _is_error(thing):
        parts += [_text(thing)]
    else:
        parts += [_code(_call(name, thing)), _text(thing)]
    if inspect.isclass(thing) and not issubclass(thing, BaseModel | BaseException):
        parts += ["\n".join(f"- {line}" for line in _members(thing))]
    return "".join(f"\n{part}\n" for part in parts if part)


def _members(kind: type) -> Iterator[str]:
    """Fields of a dataclass, then public methods and properties, except those of a base that has its own entry."""
    public = [getattr(penstock, name) for name in penstock.__all__]
    bases = [base for base in kind.__mro__[1:] if base in public]
    inherited = {name for base in bases for name in dir(base)}
    if bases:
        yield f"everything of `{bases[0].__name__}`"
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            meaning = _field_meaning(kind, field.name)
            yield f"`{field.name}: {_annotation(field.type)}`" + (f": {meaning}" if meaning else "")
    for name, member in inspect.getmembers_static(kind):
        documented = inspect.getdoc(getattr(kind, name, None))
        if name.startswith("_") or name in inherited or name == "from_pretrained" or not documented:
            continue
        first = _flat(documented.split("\n\n")[0])
        if isinstance(member, property):
            yield f"`{name}`: {first}"
        elif inspect.isroutine(member):
            coroutine = "await " if inspect.iscoroutinefunction(getattr(kind, name)) else ""
            yield f"`{coroutine}{_call(name, getattr(kind, name), wrap=False)}`: {first}"


def _field_meaning(kind: type, field: str) -> str:
    """The docstring below a field's line, in whichever class declares it."""
    for base in kind.__mro__:
        if field in inspect.get_annotations(base):
            found = re.search(
                rf'^    {field}:[^\n]*\n    """(.*?)"""', inspect.getsource(base), re.MULTILINE | re.DOTALL
            )
            return _flat(found[1]) if found else ""
    return ""


def _call(name: str, thing: Any, *, wrap: bool = True) -> str:
    """`name(parameters) -> result`; one parameter per line if it is long."""
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    shown, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
            keyword_only = True
        shown.append(str(parameter.replace(annotation=_Plain(parameter.annotation))))
    returned = signature.return_annotation
    result = "" if returned is signature.empty or inspect.isclass(thing) else f" -> {_annotation(returned)}"
    line = f"{name}({', '.join(shown)}){result}"
    if not wrap or len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){result}"


class _Plain:
    """An annotation that is shown exactly as in the source."""

    def __init__(self, annotation: Any) -> None:
        self._text = _annotation(annotation)

    def __repr__(self) -> str:
        return self._text


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _is_error(kind: type) -> bool:
    return issubclass(kind, BaseException)


def _code(text: str) -> str:
    return f"```py\n{text}\n```"


def _text(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def _flat(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(reference())
