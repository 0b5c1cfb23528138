"""How a run was started: command, host, versions and commits of each of its processes, the newest first."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from penstock.observe.report.data import RunData
from penstock.observe.report.event_data import event_time
from penstock.observe.report.markup import NOTHING, Html, join, tag

_SHORT_COMMIT = 12


def origin(data: RunData) -> Html:
    """A table for the newest process, and folded ones for those before it, if the run was resumed."""
    known = [start for start in data.events.starts if "command" in start]
    if not known:
        return NOTHING
    newest, *earlier = reversed(known)
    folded = [
        tag("details", tag("summary", f"The previous process, started {_time(start)}"), _table(start))
        for start in earlier
    ]
    return join([_table(newest), *folded])


def _table(start: Mapping[str, Any]) -> Html:
    rows = {
        "started": _time(start),
        "command": _command(start.get("command")),
        "working directory": start.get("working_directory"),
        "host": " · ".join(str(part) for part in (start.get("host"), start.get("platform")) if part),
        "git commit": _commit(start.get("git")),
        "Penstock's own commit": _commit(start.get("penstock_git")),
        "seed": start.get("seed"),
        "runtime": start.get("runtime"),
        "versions": _versions(start.get("versions")),
    }
    lines = [
        tag("tr", tag("th", name, scope="row"), tag("td", tag("code", str(value))))
        for name, value in rows.items()
        if value not in (None, "")
    ]
    return tag("div", tag("table", tag("tbody", *lines), class_="origin"), class_="scroll")


def _time(start: Mapping[str, Any]) -> str:
    time = event_time(start)
    return time.strftime("%Y-%m-%d %H:%M:%S %Z").strip() if time is not None else "an unknown time"


def _command(value: object) -> str | None:
    return shlex.join(map(str, value)) if isinstance(value, list) else None


def _commit(value: object) -> str | None:
    if not isinstance(value, Mapping) or not value.get("commit"):
        return None
    commit = str(value["commit"])[:_SHORT_COMMIT]
    return f"{commit}, with uncommitted changes" if value.get("dirty") else commit


def _versions(value: object) -> str | None:
    return ", ".join(f"{name} {version}" for name, version in value.items()) if isinstance(value, Mapping) else None
