"""Settings of what a person sees of a run."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, field_validator

from penstock.config.base import Section
from penstock.config.values import usable_path

Name = Annotated[str, Field(min_length=1)]


class TensorboardConfig(Section):
    """Event files for TensorBoard."""

    folder: Name | None = None
    """Where the event files go; by default `tensorboard/` in the run directory. Give each run a folder of its own."""

    _usable_path = field_validator("folder")(usable_path)


class WandbConfig(Section):
    """A run of Weights & Biases."""

    project: Name = "penstock"
    """The project the run belongs to."""
    entity: Name | None = None
    """The user or team whose project it is; by default yours."""
    name: Name | None = None
    """Name of the run; by default that of the run directory."""
    mode: Literal["offline", "online"] = "offline"
    """`offline`: files in the run directory, to be sent with `wandb sync` later. `online`: sent while it runs."""


class MlflowConfig(Section):
    """A run of MLflow."""

    tracking_uri: Name | None = None
    """Where runs are kept; by default files under `mlflow/` in the run directory. A server's address sends to it."""
    experiment: Name = "penstock"
    """The experiment the run belongs to."""
    name: Name | None = None
    """Name of the run; by default that of the run directory."""

    @field_validator("tracking_uri")
    @classmethod
    def _has_no_secret(cls, uri: str | None) -> str | None:
        """The settings are written to files that people share. A database's user name is none, a server's may be."""
        if "\0" in (uri or ""):
            raise ValueError("has a NUL character in it, which no address can have")
        address = urlsplit(uri or "")
        if address.password or (address.username and address.scheme in ("http", "https")):
            raise ValueError(
                "holds a password or token, which would be written to config.yaml; leave it out and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, or what the database's "
                "driver reads"
            )
        return uri


class PrometheusConfig(Section):
    """A page with the newest metrics, for a Prometheus server to read."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port of the page; 0 takes a free one and says which."""
    host: Name = "127.0.0.1"
    """Address the page listens on; other machines can read it only if you open it to them."""


class ObserveConfig(Section):
    """What a person sees."""

    console: Literal["auto", "table", "plain", "off"] = "auto"
    """`auto`: a live table on a terminal, plain lines elsewhere."""
    trace: bool = True
    """Write `trace.json`, the timeline of every group, pump, engine and trainer, for Perfetto and the report."""
    samples_per_step: NonNegativeInt = 2
    """How many responses of each step are kept, with their rewards, in `samples.jsonl`."""
    tensorboard: TensorboardConfig | None = None
    """Event files for TensorBoard; absent, there are none."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases; absent, there is none."""
    mlflow: MlflowConfig | None = None
    """A run of MLflow; absent, there is none."""
    prometheus: PrometheusConfig | None = None
    """A page for a Prometheus server; absent, nothing listens."""
