"""`penstock config show | check | schema`."""

from __future__ import annotations

import typer

from penstock.cli.arguments import ConfigFile, Json, Overrides, find_local_modules
from penstock.cli.errors import reported
from penstock.cli.output import print_json
from penstock.text import safe

_HELP = """Show and check settings.

\b
Example:
  penstock config show run.yaml
  penstock config check run.yaml training.max_steps=20
"""

config_app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@config_app.command("show")
def show(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print all settings of a run, defaults included.

    \b
    Example:
      penstock config show run.yaml
      penstock config show run.yaml training.optimizer.lr=1e-5 > resolved.yaml
    """
    with reported(as_json):
        from penstock.config.reading.loading import dump_config, load_config

        settings = load_config(config, overrides or [])
        if as_json:
            print_json(settings.model_dump(mode="json"))
        else:
            typer.echo(dump_config(settings), nl=False)


@config_app.command("check")
def check(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check whether a run can start with these settings, and report every error and warning.

    Checks names, values and contradictions, the model's files, the data, your code, the device, the loggers and the run
    directory. It loads no weights, writes nothing and contacts no server. `penstock train` starts with the same checks.
    Exits with code 2 if there is an error, with 0 if there are only warnings.

    \b
    Example:
      penstock config check run.yaml
    """
    with reported(as_json):
        from penstock.config.reading.loading import load_contradictory

        settings, contradictions = load_contradictory(config, overrides or [])
        find_local_modules()
        from penstock.run.checks import find_problems

        found = find_problems(settings, contradictions)
        found.raise_errors(source=config)
        if as_json:
            print_json({"ok": True, "findings": [problem.as_object() for problem in found.all]})
            return
        for warning in found.warnings:
            typer.echo(f"warning: {safe(str(warning))}", err=True)
        count = len(found.warnings)
        typer.echo(f"{safe(config)}: OK" + (f", {count} warning{'s' * (count != 1)}" if count else ""))


@config_app.command("schema")
def schema() -> None:
    """Print the JSON schema of a settings file.

    With it, editors complete and check the settings as you type.

    \b
    Example:
      penstock config schema > penstock.schema.json
    """
    with reported():
        from penstock.config.reading.loading import json_schema

        print_json(json_schema())
