"""Arguments that several commands share."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file with the settings.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that override the file.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
FromScratch = Annotated[
    bool,
    typer.Option("--from-scratch", help="Start over; the old run is moved to RUN_DIR.1."),
]


def find_local_modules() -> None:
    """Let settings such as `my_rewards:exact_match` name modules in the current folder; installed ones come first."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
