"""Settings of what a person sees of a run."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, field_validator

from penstock.config.reading.values import usable_path
from penstock.config.sections.base import Section

Name = Annotated[str, Field(min_length=1)]


class TensorboardConfig(Section):
    """Event files for TensorBoard."""

    folder: Name | None = None
    """Folder for the event files; by default `tensorboard/` in the run directory. Use a separate folder for each
    run."""

    _usable_path = field_validator("folder")(usable_path)


class WandbConfig(Section):
    """Logging to Weights & Biases."""

    project: Name = "penstock"
    """Project of the run."""
    entity: Name | None = None
    """User or team that owns the project; by default yours."""
    name: Name | None = None
    """Name of the run; by default that of the run directory."""
    mode: Literal["offline", "online"] = "offline"
    """`offline`: files in the run directory, to upload later with `wandb sync`. `online`: upload during the run."""


class MlflowConfig(Section):
    """Logging to MLflow."""

    tracking_uri: Name | None = None
    """Where to log: a folder, a server or a database; by default files under `mlflow/` in the run directory."""
    experiment: Name = "penstock"
    """Experiment of the run."""
    name: Name | None = None
    """Name of the run; by default that of the run directory."""

    @field_validator("tracking_uri")
    @classmethod
    def _has_no_secret(cls, uri: str | None) -> str | None:
        """The settings are written to files that people share. A database's user name is none, a server's may be."""
        if "\0" in (uri or ""):
            raise ValueError("contains a NUL character, which no address can have")
        address = urlsplit(uri or "")
        if address.password or (address.username and address.scheme in ("http", "https")):
            raise ValueError(
                "holds a password or token, which would be written to config.yaml; remove it and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, or what the database's "
                "driver reads"
            )
        return uri


class PrometheusConfig(Section):
    """An HTTP page with the latest metrics, for a Prometheus server to scrape."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port of the page; 0 picks a free one and announces it."""
    host: Name = "127.0.0.1"
    """Address that the page listens on; by default only this machine can read it."""


class ObserveConfig(Section):
    """Console, trace, samples and loggers."""

    console: Literal["auto", "table", "plain", "off"] = "auto"
    """`auto`: a live table on a terminal, plain lines elsewhere."""
    trace: bool = True
    """Write `trace.json`, the timeline of every group, pump, engine and trainer, for Perfetto and the report."""
    samples_per_step: NonNegativeInt = 2
    """Number of responses per step to keep, with their rewards, in `samples.jsonl`."""
    tensorboard: TensorboardConfig | None = None
    """Event files for TensorBoard; absent, there are none."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases; absent, there is none."""
    mlflow: MlflowConfig | None = None
    """A run of MLflow; absent, there is none."""
    prometheus: PrometheusConfig | None = None
    """A page for a Prometheus server; absent, nothing listens."""
