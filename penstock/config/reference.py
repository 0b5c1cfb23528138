"""The reference of all settings, as Markdown, from the models themselves: `python -m penstock.config.reference`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from penstock.config.models import RunConfig
from penstock.config.reading.keys import KeySpec, kind_of, members_of
from penstock.config.sections.base import Section

_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "nothing"}
_HEAD = """# Settings

Made from the configuration models by `python -m penstock.config.reference`; a test keeps it current. Any setting can be
given on the command line as `section.name=value`.
"""


def reference() -> str:
    """Every setting with its type, default and meaning; one table per section."""
    parts = [_HEAD]
    for title, section in _sections("The run", "", RunConfig):
        parts.append(f"\n## {title}\n\n{_flat(section.__doc__)}\n\n| setting | type | default | meaning |\n")
        parts.append("| --- | --- | --- | --- |\n")
        for name, field in section.model_fields.items():
            if not KeySpec.of(field.annotation).sections:
                meaning = _flat(field.description).replace("|", "\\|")
                parts.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |\n")
    return "".join(parts)


def _sections(title: str, path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """The section itself, then those below it; of a choice between kinds, one each."""
    yield title, section
    for name, field in section.model_fields.items():
        spec, key = KeySpec.of(field.annotation), f"{path}{name}"
        for below in spec.sections:
            heading = f"`{key}` with `{spec.tag}: {kind_of(below)}`" if spec.is_choice else f"`{key}`"
            yield from _sections(heading, f"{key}.", below)
        if spec.element is not None:
            yield from _sections(f"each of `{key}`", f"{key}[].", spec.element.sections[0])


def _type(annotation: Any) -> str:
    names = []
    for member in members_of(annotation):
        choice = get_args(member)[0] if get_origin(member) is Annotated else member
        if get_origin(choice) is Literal:
            names += [f"`{value}`" for value in get_args(choice)]
        elif get_origin(choice) is dict:
            names.append("mapping")
        else:
            names.append(_TYPES.get(choice, "list"))
    return ", ".join(names[:-1]) + (" or " if names[:-1] else "") + names[-1]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "nothing" if value is None else f"`{json.dumps(value)}`"


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    sys.stdout.write(reference())
