"""Starting an engine's process."""

from __future__ import annotations

from typing import Any

from penstock.config.sections.model import ModelConfig
from penstock.runtime.workers.process import ProcessWorker
from penstock.runtime.workers.spec import Placement, WorkerKind, WorkerSpec

_FACTORY = "penstock.rollout.engines.process.served:serve"


class EngineProcess:
    """A process that loads a model and serves it; started first, so that both processes load at the same time."""

    def __init__(self, model: ModelConfig, device: str, **engine: Any) -> None:
        self.name: str = engine.get("name", "embedded")
        """The engine's."""
        spec = WorkerSpec(_FACTORY, {"model": model, "device": device, "engine": engine})
        self.worker = ProcessWorker(spec, Placement(WorkerKind.PROCESS, f"engine {self.name}"))

    @property
    def pid(self) -> int:
        """Its id."""
        return self.worker.pid

    def kill(self) -> None:
        """End it now, even if it is stopped, and wait until it is gone. A second call is a no-op."""
        self.worker.kill()
