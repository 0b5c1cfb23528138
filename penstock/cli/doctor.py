"""`penstock doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from penstock.cli.arguments import Json
from penstock.cli.errors import RUN_FAILED, reported
from penstock.cli.output import print_json, print_rows

if TYPE_CHECKING:
    from penstock.run.doctor import Diagnosis
    from penstock.run.where import Home

_STYLES = {"works": "green", "broken": "bold red", "not installed": "dim"}


def doctor(as_json: Json = False) -> None:
    """Check which parts work on this machine.

    Imports every part and shows how to install missing ones. Exits with code 1 if a part that every run
    needs is missing or broken.

    \b
    Example:
      penstock doctor
      penstock doctor --json
    """
    with reported(as_json):
        from penstock.run.doctor import examine_all
        from penstock.run.where import where_it_runs

        diagnoses = examine_all()
        fatal = [diagnosis for diagnosis in diagnoses if diagnosis.is_fatal]
        if as_json:
            content = {
                "ok": not fatal,
                "parts": [diagnosis.as_object() for diagnosis in diagnoses],
                "where": [home.as_object() for home in where_it_runs()],
            }
            print_json(content)
        else:
            _print(diagnoses, where_it_runs())
        if fatal:
            raise typer.Exit(RUN_FAILED)


def _print(diagnoses: list[Diagnosis], homes: Sequence[Home]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for title, core in (("Needed by every run", True), ("Optional", False)):
        rows = [
            ((f.part.name, ""), (f.status.value, _STYLES[f.status.value]), (f.version or "", ""), (note(f), ""))
            for f in diagnoses
            if f.part.core is core
        ]
        print_rows(console, title, rows)
    where = [((h.part, ""), (h.place, ""), (h.threads, ""), (h.elsewhere, "")) for h in homes]
    print_rows(console, "Where a run's parts live, with how many threads", where)
    fatal = [diagnosis for diagnosis in diagnoses if diagnosis.is_fatal]
    for diagnosis in fatal:
        console.print(f"{diagnosis.part.name} must work before a run can start.", markup=False)
    if not fatal:
        console.print("Everything a run needs works on this machine.")


def note(diagnosis: Diagnosis) -> str:
    """What else there is to say about a part: details, whether it is used, how to install it."""
    parts = [diagnosis.detail] if diagnosis.detail else []
    if not diagnosis.part.used:
        parts.append("not used by this version")
    if diagnosis.status.value != "works" and diagnosis.part.install:
        extra = f" (extra: {diagnosis.part.extra})" if diagnosis.part.extra else ""
        parts.append(f"{diagnosis.part.install}{extra}")
    return "; ".join(parts)
