"""From the settings under `observe` to the loggers they ask for."""

from __future__ import annotations

from penstock.config.sections.observe import ObserveConfig
from penstock.observe.events import EventLog
from penstock.observe.loggers.base import Logger
from penstock.observe.loggers.mlflow import MlflowLogger
from penstock.observe.loggers.prometheus import PrometheusLogger
from penstock.observe.loggers.tensorboard import TensorboardLogger
from penstock.observe.loggers.wandb import WandbLogger


def make_loggers(config: ObserveConfig, events: EventLog) -> list[Logger]:
    """The loggers that the settings ask for, not yet started; none by default."""
    loggers: list[Logger] = []
    if config.prometheus is not None:
        loggers.append(PrometheusLogger(config.prometheus, lambda: events.counts_by_name))
    if config.tensorboard is not None:
        loggers.append(TensorboardLogger(config.tensorboard))
    if config.mlflow is not None:
        loggers.append(MlflowLogger(config.mlflow))
    if config.wandb is not None:
        loggers.append(WandbLogger(config.wandb))
    return loggers
