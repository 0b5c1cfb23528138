"""HTML that is safe by construction: every text is escaped unless it was made here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

_VOID = frozenset({"br", "hr", "input", "meta", "path", "rect", "line"})


class Html(str):
    """Text that is already HTML. Putting it into an f-string makes it plain text again, which is escaped."""

    __slots__ = ()


Child = Html | str | int | float | None
NOTHING = Html("")


def text(value: object) -> Html:
    """A value as text on a page."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(children: Iterable[Child], between: str = "") -> Html:
    """Several pieces in sequence; None is left out."""
    return Html(between.join(text(child) for child in children if child is not None))


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element. `class_` is `class`, `data_x` is `data-x`; None and False leave an attribute out, True has no value.

    Example: `tag("p", "a < b", class_="note")` is `<p class="note">a &lt; b</p>`.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID and not children:
        return Html(f"<{name}{written}/>") if name in ("path", "rect", "line") else Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def script_json(value: Any) -> Html:
    """JSON for the inside of a `<script type="application/json">`: no text in it can end the element."""
    encoded = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _attribute(key: str, value: object) -> str:
    if value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value), quote=True)}"'
