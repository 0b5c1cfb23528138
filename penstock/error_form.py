"""An error as plain data, and as an error again: how errors cross between processes, by our wire and by `pickle`.

Type, arguments, fields, notes and the chain of causes survive, and where it was raised arrives as text. The failure
policy (`penstock.controller.failures.classify`) reads the same from it on both sides.

A class that the other side may not know, since it is user code's or a library's, arrives as a `RemoteError` of the same
name that is also an instance of its nearest known base: an `aiohttp.ClientOSError` is still an `OSError` with its
`errno`. Errors that would act on the process that receives them (`KeyboardInterrupt`, `SystemExit`, a cancellation)
arrive as a plain `RemoteError`.
"""

from __future__ import annotations

import builtins
import importlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from penstock.text import error_text, repr_text

NONE = -1
"""In place of a link's index: there is none."""
_MOST_LINKS = 256
"""How many errors of a chain are kept; the failure policy looks 200 deep."""
_LONGEST_TRACEBACK = 16_000
_PACKAGE = "penstock."
_LIBRARY = ("socket:gaierror", "concurrent.futures._base:BrokenExecutor")
"""Further classes that the failure policy knows."""
_ACTING = (StopIteration, StopAsyncIteration)
"""A future refuses them."""
_DEEPEST_FIELD = 20


class RemoteError(Exception):
    """An error of another process whose class may not be known here; the class of the instance has its name."""

    remote_class: str = ""
    """Module and name of its class there, as `module:name`."""
    remote_text: str = ""
    """What it says."""
    remote_traceback: str = ""
    """Where it was raised, as Python prints it."""

    def __str__(self) -> str:
        return self.remote_text

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (told(self),)


@dataclass(frozen=True)
class ErrorLink:
    """One error of a chain; other errors of the chain are named by their index."""

    name: str
    """Module and name of its class."""
    base: str
    """The nearest of its classes that every process knows; the same as `name` if it is that class itself."""
    text: str
    """What it says."""
    arguments: tuple[Any, ...] = ()
    """What the base class makes it from."""
    fields: Mapping[str, Any] | None = None
    """Its attributes, notes included."""
    traceback: str = ""
    """Where it was raised, with its causes; of the outermost error only."""
    cause: int = NONE
    context: int = NONE
    suppress_context: bool = False
    members: tuple[int, ...] = ()
    """Of a group."""


def told(error: BaseException) -> tuple[ErrorLink, ...]:
    """An error and all that led to it as plain data, the error itself first."""
    chain = _chain(error)
    index = {id(link): number for number, link in enumerate(chain)}
    links = [_link(link, index) for link in chain]
    return (_with_traceback(links[0], error), *links[1:])


def rebuilt(links: tuple[ErrorLink, ...]) -> Exception:
    """The error that `told` described. Raises `ValueError` or `TypeError` if it is none."""
    if not links or len(links) > _MOST_LINKS:
        raise ValueError(f"an error's form has {len(links)} links")
    errors: dict[int, Exception] = {}
    for number in _members_first(links):
        link = links[number]
        members = [errors[member] for member in link.members if member in errors]
        errors[number] = _error(link, members)
    for number, link in enumerate(links):
        errors[number].__cause__ = None if link.cause == NONE else errors[link.cause]
        errors[number].__context__ = None if link.context == NONE else errors[link.context]
        errors[number].__suppress_context__ = bool(link.suppress_context)
    return _with_remote_traceback(errors[0], links[0])


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    seen: set[int] = set()
    todo = [error]
    while todo and len(chain) < _MOST_LINKS:
        link = todo.pop()
        if id(link) not in seen:
            seen.add(id(link))
            chain.append(link)
            todo += reversed([lead for lead in _leads(link) if lead is not None])
    return chain


def _leads(error: BaseException) -> Iterator[BaseException | None]:
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    yield error.__cause__
    yield error.__context__


def _link(error: BaseException, index: Mapping[int, int]) -> ErrorLink:
    kind = type(error)
    base = next((known for known in kind.__mro__ if _is_known(known)), Exception)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return ErrorLink(
        name=error.remote_class if isinstance(error, RemoteError) else _full_name(kind),
        base=_full_name(base),
        text=error_text(error),
        arguments=_arguments(error, base),
        fields=_fields(error, base),
        cause=index.get(id(error.__cause__), NONE),
        context=index.get(id(error.__context__), NONE),
        suppress_context=error.__suppress_context__,
        members=tuple(index[id(member)] for member in members if id(member) in index),
    )


def _arguments(error: BaseException, base: type) -> tuple[Any, ...]:
    if issubclass(base, BaseExceptionGroup):
        return (error.message,) if isinstance(error, BaseExceptionGroup) else ()
    arguments = error.args
    if base.__module__ == builtins.__name__ and issubclass(base, OSError):
        arguments = base.__reduce__(error)[1]  # type: ignore[assignment]  # with its file names
    return arguments if _is_plain(arguments) else tuple(one if _is_plain(one) else repr_text(one) for one in arguments)


def _fields(error: BaseException, base: type) -> dict[str, Any]:
    fields = {name: value for name, value in vars(error).items() if isinstance(name, str) and _is_plain(value)}
    kind = getattr(error, "failure_kind", None)
    if isinstance(kind, Enum) and getattr(base, "failure_kind", None) is not kind:
        fields["failure_kind"] = kind
    return fields


def _with_traceback(link: ErrorLink, error: BaseException) -> ErrorLink:
    here = "".join(traceback.format_exception(error)) if error.__traceback__ is not None else ""
    there = getattr(error, "remote_traceback", None)
    said = f"{there}\n{here}" if isinstance(there, str) and there not in here else here
    if len(said) > _LONGEST_TRACEBACK:
        half = _LONGEST_TRACEBACK // 2
        said = f"{said[:half]}\n  [...]\n{said[-half:]}"
    return replace(link, traceback=said)


def _with_remote_traceback(error: Exception, link: ErrorLink) -> Exception:
    if isinstance(link.traceback, str) and link.traceback:
        known = bool(getattr(error, "remote_traceback", ""))
        error.remote_traceback = link.traceback  # type: ignore[attr-defined]
        if not known and not link.base.startswith(_PACKAGE):  # our own say enough by themselves
            error.add_note(f"In another process:\n{link.traceback}")
    return error


def _members_first(links: tuple[ErrorLink, ...]) -> list[int]:
    """An order in which a group comes after its members."""
    order: list[int] = []
    state = [0] * len(links)
    todo = list(reversed(range(len(links))))
    while todo:
        number = todo.pop()
        if state[number] == 0:
            state[number] = 1
            todo.append(number)
            todo += [member for member in links[number].members if state[member] == 0]
        elif state[number] == 1:
            state[number] = 2
            order.append(number)
    return order


def _error(link: ErrorLink, members: list[Exception]) -> Exception:
    base: Any = _known_class(link.base)
    kind = base if link.name == link.base else _stand_in(link.name, base)
    arguments = (*link.arguments, members) if issubclass(base, BaseExceptionGroup) else link.arguments
    error: Exception
    if base.__module__ in (builtins.__name__, "socket"):
        try:
            error = kind(*arguments)
        except (TypeError, ValueError):  # what the class is made from cannot cross: it arrives as text
            kind = _stand_in(link.name, Exception)
            error = kind(*link.arguments)
    else:
        error = kind.__new__(kind, *arguments)  # its fields say the rest: `__init__` may make a message out of others
    vars(error).update(link.fields or {})
    if isinstance(error, RemoteError):
        error.remote_class, error.remote_text = str(link.name), str(link.text)
    return error


@lru_cache(maxsize=128)
def _stand_in(name: str, base: Any) -> type[Exception]:
    short = name.rpartition(":")[2].rpartition(".")[2]
    bases = (RemoteError,) if base is Exception else (RemoteError, base)
    name = short if short.isidentifier() else RemoteError.__name__
    return type(name, bases, {"__module__": __name__, "__doc__": RemoteError.__doc__})


def _full_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_known(kind: type) -> bool:
    """Whether every process of ours can have this class, and raise it without being ended by it."""
    if not issubclass(kind, Exception) or issubclass(kind, (RemoteError, *_ACTING)):
        return False
    if kind.__module__ == builtins.__name__:
        return getattr(builtins, kind.__name__, None) is kind
    if _full_name(kind) in _LIBRARY:
        return True
    modules = {base.__module__ for base in kind.__mro__}  # a library's error may say what its fields say
    return "<locals>" not in kind.__qualname__ and all(
        module == builtins.__name__ or module.startswith(_PACKAGE) for module in modules
    )


def _known_class(name: str) -> type[Exception]:
    module, _, inner = name.partition(":")
    found: Any = None
    if module == builtins.__name__:
        found = getattr(builtins, inner, None)
    elif name in _LIBRARY or (name.startswith(_PACKAGE) and "__main__" not in name):
        try:
            found = importlib.import_module(module)
            for part in inner.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ValueError("an error's form names a class that there is not") from error
    if not isinstance(found, type) or not _is_known(found) or _full_name(found) != name:
        raise ValueError("an error's form names a class that is no error of ours")
    return found


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is one that any process can hold: no object of user code's or a library's."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return True
    if depth > _DEEPEST_FIELD:
        return False
    if isinstance(value, Enum):
        return kind.__module__.startswith(_PACKAGE)
    if kind in (list, tuple, set, frozenset) or (isinstance(value, tuple) and kind.__module__.startswith(_PACKAGE)):
        return all(_is_plain(item, depth + 1) for item in value)
    return kind is dict and all(_is_plain(part, depth + 1) for item in value.items() for part in item)
