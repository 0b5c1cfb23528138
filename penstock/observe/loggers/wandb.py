"""A run of Weights & Biases: files in the run directory, and nothing on the network unless `mode` is `online`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from penstock.config.sections.observe import WandbConfig
from penstock.errors import SetupError
from penstock.observe.loggers.base import Outcome, RunInfo, environment, needs

_FINISH_SECONDS = 25.0
"""How long an online run may take to send its remaining data; the rest can be sent with `wandb sync`."""
_EXIT_CODES = {Outcome.FINISHED: 0, Outcome.FAILED: 1, Outcome.INTERRUPTED: 255}
"""255 is how Weights & Biases itself marks a run ended by Ctrl-C."""


class WandbLogger:
    """History by step, the settings as its config, the summary as its summary.

    The run is its own object: `wandb.run` and the package's other globals are left unchanged. Code, git state, machine,
    installed packages and console output are not collected. A history takes no earlier step: when the steps after a
    checkpoint come again, another run of the same name has them, as after a resume.
    """

    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._exit_code = 1
        self._step = 0

    def start(self, run: RunInfo) -> str:
        """Begin a run; online only with credentials that the server accepts."""
        # Read by the helper process, which lives as long as this one: crash reports are not sent.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        with _quiet(run):
            with needs("observe.wandb", "wandb>=0.31"):
                import wandb  # noqa: F401
            run.folder.mkdir(parents=True, exist_ok=True)
            if self._config.mode == "online":
                _log_in()
            self._info = run
            self._begin()
        return str(self._run.url) if self._config.mode == "online" else str(os.path.dirname(self._run.dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row of the history; an evaluation adds its values to the row of its step."""
        if step < self._step:
            self._run.finish(exit_code=_EXIT_CODES[Outcome.FAILED])
            with _quiet(self._info):
                self._begin()
        self._step = step
        self._run.log(dict(metrics), step=step)

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        """The summary, and the exit code that stands for the outcome."""
        self._exit_code = _EXIT_CODES[outcome]
        self._run.summary.update({"status": outcome.value, **values})

    def close(self) -> None:
        """End the run."""
        self._run.finish(exit_code=self._exit_code)

    def _begin(self) -> None:
        import wandb

        excepthook = sys.excepthook
        self._run = wandb.init(config=dict(self._info.settings), settings=self._settings(self._info))
        # Its own hook prints every traceback once more; `summary` reports how the run ended.
        sys.excepthook = excepthook

    def _settings(self, run: RunInfo) -> Any:
        import wandb

        return wandb.Settings(
            mode=self._config.mode,
            project=self._config.project,
            entity=self._config.entity,
            run_name=self._config.name or run.name,
            root_dir=str(run.folder.absolute()),
            reinit="create_new",
            silent=True,
            console="off",
            symlink=False,
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            finish_timeout=_FINISH_SECONDS,
            finish_timeout_raises=True,
        )


def _quiet(run: RunInfo) -> AbstractContextManager[None]:
    return environment(WANDB_SILENT="true", WANDB_CACHE_DIR=str(run.folder.absolute() / "wandb" / "cache"))


def check_mode() -> None:
    """Raise if the environment contradicts `mode: online`."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        raise SetupError(f"observe.wandb.mode: is online, but the environment has WANDB_MODE={mode}; unset one")


def _log_in() -> None:
    """Find credentials and have the server accept them; never asks a person."""
    import wandb

    key = "observe.wandb.mode"
    check_mode()
    try:
        is_known = wandb.run is not None or wandb.login(prompt=False, verify=True)
    except wandb.errors.Error as error:
        raise SetupError(f"{key}: Weights & Biases cannot be reached or refuses the API key: {error}") from error
    if not is_known:
        raise SetupError(
            f"{key}: online needs an API key, and there is none; run `wandb login` once, set WANDB_API_KEY, or use "
            "mode: offline"
        )
