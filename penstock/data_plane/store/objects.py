"""Objects of a column as bytes: one that says whether it is text or JSON, then its UTF-8."""

from __future__ import annotations

import json
from typing import Any

_TEXT, _JSON = b"t", b"j"


def encoded(item: Any) -> bytes:
    """The bytes of a plain value."""
    if type(item) is str:
        return _TEXT + item.encode("utf-8", "surrogatepass")
    return _JSON + json.dumps(item).encode()


def decoded(content: bytes) -> Any:
    """What `encoded` was given."""
    return content[1:].decode("utf-8", "surrogatepass") if content[:1] == _TEXT else json.loads(content[1:])
