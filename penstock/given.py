"""Objects passed in from Python, under names that settings can hold.

Settings name code as `module:name`. A notebook function, a lambda or a class inside a function has no such name in
another process. During a call such as `penstock.train(config, reward=my_reward)` it is an attribute of this module, so
`penstock.given:my_reward` refers to it wherever settings are read. No other process has it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.errors import ConfigError

_objects: dict[str, object] = {}
_users: Counter[str] = Counter()
"""How many running calls were given the object of each name; both change together, under the lock."""
_lock = threading.Lock()


def __getattr__(name: str) -> object:
    try:
        return _objects[name]
    except KeyError:
        raise AttributeError(lost_words(name)) from None


def import_path(thing: object) -> str:
    """The `module:name` of an object: its own if another process can import it, else one in this module."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    is_named = isinstance(module, str) and isinstance(name, str) and is_importable(module)
    if is_named and getattr(sys.modules.get(str(module)), str(name), None) is thing:
        return f"{module}:{name}"
    words = getattr(thing, "__name__", None) or type(thing).__name__
    return f"{__name__}:{re.sub(r'[^0-9A-Za-z_]', '', words) or 'object'}"


def is_importable(module: str) -> bool:
    """Whether another process can import a module: not the program itself, and not one created on the fly."""
    made_here = module in ("__main__", __name__)
    return not made_here and getattr(sys.modules.get(module, sys), "__spec__", None) is not None


def is_only_here(path: str) -> bool:
    """Whether `path` names an object that was passed in from Python and that no other process can import."""
    return path.partition(":")[0] == __name__


def is_lost(path: str) -> bool:
    """Whether `path` names an object that was given to another process, or to an earlier call."""
    return is_only_here(path) and path.partition(":")[2] not in _objects


def lost_words(path: str) -> str:
    """What to say about such a path, after its key."""
    name = path.rpartition(":")[2]
    return (
        f"{name} is an object that was given from Python and has no name that another process could import; give it "
        "again, from Python"
    )


@contextmanager
def available(objects: Mapping[str, object]) -> Iterator[None]:
    """Inside this context the paths of `objects`, as `import_path` returns them, refer to these objects.

    Calls may overlap in any order: an object stays until the last call that was given it has ended.
    Raises `ConfigError` if another running call was given a different object of the same name.
    """
    mine = {path.partition(":")[2]: thing for path, thing in objects.items() if is_only_here(path)}
    with _lock:
        taken = [name for name, thing in mine.items() if _objects.get(name, thing) is not thing]
        if taken:
            raise ConfigError(
                [
                    f"{taken[0]}: another run in this process was given a different object of this name; rename one "
                    "of them"
                ]
            )
        _objects.update(mine)
        _users.update(mine.keys())
    try:
        yield
    finally:
        with _lock:
            _users.subtract(mine.keys())
            for name in [name for name in mine if not _users[name]]:
                del _objects[name], _users[name]
