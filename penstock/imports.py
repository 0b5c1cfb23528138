"""The user's own code, named in the configuration as `module:name`."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from penstock import given
from penstock.errors import ConfigError
from penstock.text import error_text, named_error


def import_callable(path: str, key: str, what: str) -> Callable[..., Any]:
    """The callable that `module:name` refers to; `key` and `what` are for the message that there is none.

    Anything that the user's module raises during import, including `sys.exit()`, is an error of the setting.
    """
    module_name, _, name = path.partition(":")
    if given.is_lost(path):
        raise ConfigError([f"{key}: {given.lost_words(path)}"])
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)
        names = [] if callable(found) else [n for n in dir(module) if callable(getattr(module, n, None))]
    except BaseException as error:
        raise ConfigError([f"{key}: module {module_name!r} cannot be imported: {named_error(error)}"]) from error
    if not callable(found):
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError([f"{key}: module {module_name!r} has no {what} {name!r}{hint}"])
    return found  # type: ignore[no-any-return]


def made_callable(path: str, args: Mapping[str, Any], section: str) -> Callable[..., Any]:
    """What `module:name` refers to, with `args`: a function that takes them as extra keyword arguments, or an instance
    of a class constructed with them.

    `section` is the section that holds the settings `import_path` and `args`, for messages.
    """
    found = import_callable(path, f"{section}.import_path", "function or class")
    if not isinstance(found, type):
        return functools.partial(found, **args) if args else found
    try:
        made = found(**args)
    except TypeError as error:
        raise ConfigError([f"{section}.args: {path} does not take them: {error_text(error)}"]) from error
    except BaseException as error:  # anything a user's constructor raises
        raise ConfigError([f"{section}.args: {path} cannot be constructed: {named_error(error)}"]) from error
    if not callable(made):
        raise ConfigError([f"{section}.import_path: objects of {path} cannot be called; give the class a __call__"])
    return made  # type: ignore[no-any-return]
