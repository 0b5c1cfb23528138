"""The `penstock` command."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

import penstock
from penstock.cli.config import config_app
from penstock.cli.doctor import doctor
from penstock.cli.errors import INTERRUPTED, RUN_FAILED
from penstock.cli.evaluate import evaluate
from penstock.cli.leaving import ProcessEnd, exit_status
from penstock.cli.report import report
from penstock.cli.resume import resume
from penstock.cli.streams import Streams
from penstock.cli.train import train
from penstock.cli.verify import verify
from penstock.runtime.cpu import let_idle_threads_sleep

app = typer.Typer(
    name="penstock",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models.

    \b
    Example:
      penstock doctor
      penstock config check run.yaml
      penstock train run.yaml training.max_steps=20
      penstock resume runs/default
      penstock report runs/default
    """


app.command("train")(train)
app.command("resume")(resume)
app.command("eval")(evaluate)
app.command("verify")(verify)
app.command("report")(report)
app.add_typer(config_app, name="config")
app.command("doctor")(doctor)


def main() -> None:
    """Run the command that the arguments name, and end the process with its code even if something still runs."""
    let_idle_threads_sleep()
    ending = ProcessEnd(Streams())
    code = RUN_FAILED
    try:
        app()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as leaving:
        code = exit_status(leaving.code)
    except BaseException:  # noqa: BLE001 - shown as Python itself would, before the process ends
        sys.excepthook(*sys.exc_info())
    finally:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # everything is done: another Ctrl-C must not change the exit code
    ending.leave(code)
