"""A run of MLflow: files in the run directory, or the server or database that `tracking_uri` names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from penstock.config.sections.observe import MlflowConfig
from penstock.errors import SetupError
from penstock.observe.loggers.base import MetricName, Outcome, RunInfo, environment, needs

T = TypeVar("T")

_BATCH = 100
"""Parameters or tags that one request may carry; there may be more metrics."""
_METRICS = 1000
_LONGEST = 4000
"""Characters of a parameter's or tag's value that every store accepts."""
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
WHOLE_PACKAGE = "a database needs the whole package: pip install mlflow"
_STATUS = {Outcome.FINISHED: "FINISHED", Outcome.FAILED: "FAILED", Outcome.INTERRUPTED: "KILLED"}


class MlflowLogger:
    """Metrics by step, the settings as parameters, the summary as tags `penstock.<key>`.

    Talks to the store through its own client: the package's active run and tracking address are left unchanged, and
    nothing is collected about user, code or machine. `MLFLOW_TRACKING_URI` is not read: without a `tracking_uri`, a run
    stays on this machine.
    """

    name = "mlflow"

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def start(self, run: RunInfo) -> str:
        """Begin a run; an address that does not answer is given up after a few seconds."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # MLflow keeps its store of plain files, the only one that needs no database package, behind this switch.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        with needs("observe.mlflow", "mlflow-skinny>=2.15"):
            from mlflow.tracking import MlflowClient
        uri = self._config.tracking_uri or (run.folder.absolute() / "mlflow").as_uri()
        with environment(MLFLOW_HTTP_REQUEST_MAX_RETRIES="1", MLFLOW_HTTP_REQUEST_TIMEOUT="20"):
            try:
                self._client = MlflowClient(tracking_uri=uri)
                self._run_id = self._create_run(self._config.name or run.name)
                self._write_params(run)
            except Exception as error:
                raise SetupError(_refusal(self._config.tracking_uri, error)) from error
        return f"{uri} (experiment {self._config.experiment}, run {self._run_id})"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of the step at once."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        records = [Metric(metric_key(key), float(value), now, step) for key, value in metrics.items()]
        for batch in _batches(records, _METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        """Tags, and the status that stands for the outcome."""
        from mlflow.entities import RunTag

        tags = [
            RunTag(_allowed(f"penstock.{key}"), _short(value)) for key, value in values.items() if value is not None
        ]
        for batch in _batches(tags, _BATCH):
            self._client.log_batch(self._run_id, tags=batch)
        with environment(MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT="true"):
            self._client.set_terminated(self._run_id, _STATUS[outcome])

    def close(self) -> None:
        """Nothing is held open."""

    def _create_run(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(self._config.experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(self._config.experiment)
        else:
            experiment_id = experiment.experiment_id
        return str(self._client.create_run(experiment_id, run_name=name).info.run_id)

    def _write_params(self, run: RunInfo) -> None:
        from mlflow.entities import Param

        params = [Param(_allowed(key), _short(value)) for key, value in run.settings.items()]
        for batch in _batches(params, _BATCH):
            self._client.log_batch(self._run_id, params=batch)


def metric_key(key: str) -> str:
    """`train/reward_mean/gsm8k` as `train/reward_mean.gsm8k`.

    In a store of files `train/reward_mean` is a file and cannot be a folder as well. Characters that MLflow refuses
    become underscores.
    """
    name = MetricName.parse(key)
    if name.value is None:
        return _allowed(name.base)
    return _allowed(f"{name.base}.{name.value.replace('/', '_')}")


def _allowed(key: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)


def _short(value: Any) -> str:
    return str(value)[:_LONGEST]


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _refusal(uri: str | None, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    if uri is None:
        return f"observe.mlflow: files in the run directory cannot be written: {reason}"
    advice = f"; {WHOLE_PACKAGE}" if uri.partition(":")[0].partition("+")[0] in DATABASES else ""
    return f"observe.mlflow.tracking_uri: {uri!r} cannot be used{advice}: {reason}"
