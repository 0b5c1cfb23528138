"""Code of the user's, named in the configuration as `module:name`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from penstock import given
from penstock.errors import ConfigError
from penstock.text import named_error


def import_callable(path: str, key: str, what: str) -> Callable[..., Any]:
    """The callable that `module:name` means; `key` and `what` are for the message that there is none.

    Whatever the user's module does while it is imported, `sys.exit()` included, is an error of the setting.
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
