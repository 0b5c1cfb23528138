"""Which classes may cross between processes.

A class is marked where it is declared, and found by its full name, `module:name`. Whoever decodes imports only modules
of this package, and takes only marked classes; no other code can be reached by what a message says.
"""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.errors import WireError
from penstock.text import cut

C = TypeVar("C", bound=type)

_PACKAGE = "penstock."
_marked: dict[str, type] = {}


def crosses(kind: C) -> C:
    """Mark a frozen dataclass, an enum or a named tuple: its instances may cross between processes, and be pickled.

    What its fields hold must be able to cross as well. Stands above `@dataclass`.
    """
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if not (frozen or issubclass(kind, Enum) or hasattr(kind, "_fields")):
        raise TypeError(f"{kind.__qualname__} cannot cross: it is no frozen dataclass, enum or named tuple")
    if "<locals>" in kind.__qualname__:
        raise TypeError(f"{kind.__qualname__} cannot cross: nobody could find it inside a function")
    _marked[full_name(kind)] = kind
    return kind


def full_name(kind: type) -> str:
    """A class's module and name, as `module:name`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_marked(kind: type) -> bool:
    """Whether instances of exactly this class may cross."""
    return _marked.get(full_name(kind)) is kind


def marked_classes() -> tuple[type, ...]:
    """All marked classes of the modules imported so far, by name."""
    return tuple(_marked[name] for name in sorted(_marked))


def marked_class(name: str) -> type:
    """The marked class of a full name; imports its module if that belongs to this package. Raises `WireError`."""
    if name not in _marked:
        class_of_package(name)
    if name not in _marked:
        raise WireError(f"{name} is not marked as something that crosses between processes")
    return _marked[name]


def class_of_package(name: str) -> type:
    """Any class of this package, by its full name. Raises `WireError`."""
    module, _, inner = name.partition(":")
    parts = module.split(".")
    if not module.startswith(_PACKAGE) or "__main__" in parts or not all(map(str.isidentifier, parts)):
        raise WireError(f"{cut(name, 200)!r} is not a class of Penstock")
    try:
        found: Any = importlib.import_module(module)
        for part in inner.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise WireError(f"there is no {cut(name, 200)}") from error
    if not isinstance(found, type) or full_name(found) != name:
        raise WireError(f"{cut(name, 200)} is not where a class is declared")
    return found


def field_names(kind: type) -> tuple[str, ...]:
    """The fields of a marked dataclass or named tuple, in order."""
    named: tuple[str, ...] | None = getattr(kind, "_fields", None)
    return named if named is not None else tuple(field.name for field in fields(kind))


def _read_only(content: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(content)


def _reduced(content: Mapping[Any, Any]) -> tuple[Any, ...]:
    return _read_only, (dict(content),)


copyreg.pickle(MappingProxyType, _reduced)
# Marked classes hold read-only mappings, which Python itself does not pickle.
