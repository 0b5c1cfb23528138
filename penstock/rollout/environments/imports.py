"""Code of the user's, named in the configuration as `module:name`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError


def import_callable(path: str, key: str, what: str) -> Callable[..., Any]:
    """The callable that `module:name` means; `key` and `what` are for the message that there is none."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ConfigError(
            [f"{key}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"]
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        close = difflib.get_close_matches(name, [n for n in dir(module) if callable(getattr(module, n, None))], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError([f"{key}: module {module_name!r} has no {what} {name!r}{hint}"])
    return found  # type: ignore[no-any-return]
