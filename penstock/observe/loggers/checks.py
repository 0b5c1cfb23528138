"""What would keep a logger from starting, as far as it can be known without starting it or asking a server."""

from __future__ import annotations

import importlib.util
import os
import socket
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config.sections.observe import (
    MlflowConfig,
    ObserveConfig,
    PrometheusConfig,
    TensorboardConfig,
    WandbConfig,
)
from penstock.errors import SetupError
from penstock.observe.loggers.base import missing_package
from penstock.observe.loggers.mlflow import DATABASES, WHOLE_PACKAGE
from penstock.observe.loggers.prometheus import refusal
from penstock.observe.loggers.wandb import check_mode

_SERVERS = ("http", "https")
_MLFLOW_SCHEMES = ("", "file", "databricks", "databricks-uc", "uc", *_SERVERS)


def check_loggers(config: ObserveConfig) -> None:
    """Raise `SetupError` if a logger that the settings ask for could not start; leaves nothing behind."""
    if config.tensorboard is not None:
        _require("tensorboard", "observe.tensorboard", "tensorboard>=2.15")
        _check_tensorboard(config.tensorboard)
    if config.wandb is not None:
        _require("wandb", "observe.wandb", "wandb>=0.31")
        _check_wandb(config.wandb)
    if config.mlflow is not None:
        _require("mlflow", "observe.mlflow", "mlflow-skinny>=2.15")
        _check_mlflow(config.mlflow)
    if config.prometheus is not None:
        _require("prometheus_client", "observe.prometheus", "prometheus-client>=0.20")
        _check_prometheus(config.prometheus)


def _require(module: str, key: str, requirement: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise missing_package(key, requirement, "it is not installed")


def _check_tensorboard(config: TensorboardConfig) -> None:
    if config.folder is None:
        return
    folder = Path(config.folder).absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise SetupError(
            f"observe.tensorboard.folder: {config.folder!r} cannot be written: {str(nearest)!r} is not a folder that "
            "you can write to"
        )


def _check_wandb(config: WandbConfig) -> None:
    if config.mode == "online":
        check_mode()


def _check_mlflow(config: MlflowConfig) -> None:
    if config.tracking_uri is None:
        return
    address = urlsplit(config.tracking_uri)
    scheme = address.scheme.partition("+")[0]
    problem = None
    if scheme in DATABASES:
        problem = None if importlib.util.find_spec("sqlalchemy") is not None else WHOLE_PACKAGE
    elif scheme in _SERVERS and not address.hostname:
        problem = "names no host"
    elif scheme not in _MLFLOW_SCHEMES and scheme not in entry_points(group="mlflow.tracking_store").names:
        problem = f"has the scheme {scheme!r}, which MLflow does not support; give a folder, a server or a database"
    if problem is not None:
        raise SetupError(f"observe.mlflow.tracking_uri: {config.tracking_uri!r} {problem}")


def _check_prometheus(config: PrometheusConfig) -> None:
    """Listen for a moment, as the page will."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        raise SetupError(refusal(config, error)) from error
