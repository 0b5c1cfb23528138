"""Penstock: asynchronous reinforcement learning of language models.

`train`, `resume`, `evaluate`, `verify` and `report` do what the commands of the same names do. The parts (engine,
trainer, data plane, weight sync, staleness policies, environments) also work on their own, in your own loop
(docs/own-loop.md). Names are imported on first use, so `import penstock` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_LAZY = {
    "load_config": "penstock.config.reading.loading",
    "train": "penstock.run.front_door",
    "resume": "penstock.run.front_door",
    "evaluate": "penstock.run.front_door",
    "verify": "penstock.run.front_door",
    "report": "penstock.run.front_door",
    "Logger": "penstock.observe.loggers.base",
    "RunInfo": "penstock.observe.loggers.base",
    "Outcome": "penstock.observe.loggers.base",
    "RunResult": "penstock.run.result",
    "EvalResult": "penstock.run.evaluate",
    "VerifyReport": "penstock.run.verify.findings",
    "WrittenReport": "penstock.observe.report.build",
    "RunConfig": "penstock.config.models",
    "ModelConfig": "penstock.config.sections.model",
    "AlgorithmConfig": "penstock.config.sections.algorithm",
    "TrainingConfig": "penstock.config.sections.training",
    "EmbeddedEngine": "penstock.rollout.engines.embedded.engine",
    "SamplingParams": "penstock.rollout.engines.base",
    "GenerationRequest": "penstock.rollout.engines.base",
    "GenerationResult": "penstock.rollout.engines.base",
    "LocalTrainer": "penstock.training.workers.local",
    "ChunkResult": "penstock.training.interface",
    "StepResult": "penstock.training.interface",
    "grpo_advantages": "penstock.algorithms.advantages",
    "LossTokens": "penstock.algorithms.custom",
    "SampleScores": "penstock.algorithms.custom",
    "put_group": "penstock.rollout.put_group",
    "DataPlaneClient": "penstock.data_plane.client",
    "FieldKind": "penstock.data_plane.field_spec",
    "FieldSpec": "penstock.data_plane.field_spec",
    "MemoryDataPlane": "penstock.data_plane.adapters.memory",
    "KVBatchMeta": "penstock.data_plane.meta",
    "WeightSynchronizer": "penstock.weights.synchronizer",
    "SingleController": "penstock.controller.controller",
    "ReplayBuffer": "penstock.buffer.replay_buffer",
    "StalenessSampler": "penstock.buffer.samplers.base",
    "BucketSampler": "penstock.buffer.samplers.base",
    "Environment": "penstock.rollout.environments.base",
    "SingleTurnEnvironment": "penstock.rollout.environments.turns.single_turn",
    "MultiTurnEnvironment": "penstock.rollout.environments.turns.multi_turn",
    "ExtraColumn": "penstock.rollout.environments.extra_columns",
    "Prompt": "penstock.rollout.prompts",
    "Split": "penstock.rollout.environments.base",
    "Observation": "penstock.rollout.environments.turns.multi_turn",
    "Done": "penstock.rollout.environments.turns.multi_turn",
    "Trajectory": "penstock.rollout.environments.base",
    "PenstockError": "penstock.errors",
    "ConfigError": "penstock.errors",
    "SetupError": "penstock.errors",
}
"""Where each public name lives, in the order of docs/api.md."""

__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:  # for type checkers, which cannot follow the lazy names below
    from penstock.algorithms.advantages import grpo_advantages as grpo_advantages
    from penstock.algorithms.custom import LossTokens as LossTokens
    from penstock.algorithms.custom import SampleScores as SampleScores
    from penstock.buffer.replay_buffer import ReplayBuffer as ReplayBuffer
    from penstock.buffer.samplers.base import BucketSampler as BucketSampler
    from penstock.buffer.samplers.base import StalenessSampler as StalenessSampler
    from penstock.config.models import RunConfig as RunConfig
    from penstock.config.reading.loading import load_config as load_config
    from penstock.config.sections.algorithm import AlgorithmConfig as AlgorithmConfig
    from penstock.config.sections.model import ModelConfig as ModelConfig
    from penstock.config.sections.training import TrainingConfig as TrainingConfig
    from penstock.controller.controller import SingleController as SingleController
    from penstock.data_plane.adapters.memory import MemoryDataPlane as MemoryDataPlane
    from penstock.data_plane.client import DataPlaneClient as DataPlaneClient
    from penstock.data_plane.field_spec import FieldKind as FieldKind
    from penstock.data_plane.field_spec import FieldSpec as FieldSpec
    from penstock.data_plane.meta import KVBatchMeta as KVBatchMeta
    from penstock.errors import ConfigError as ConfigError
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import SetupError as SetupError
    from penstock.observe.loggers.base import Logger as Logger
    from penstock.observe.loggers.base import Outcome as Outcome
    from penstock.observe.loggers.base import RunInfo as RunInfo
    from penstock.observe.report.build import WrittenReport as WrittenReport
    from penstock.rollout.engines.base import GenerationRequest as GenerationRequest
    from penstock.rollout.engines.base import GenerationResult as GenerationResult
    from penstock.rollout.engines.base import SamplingParams as SamplingParams
    from penstock.rollout.engines.embedded.engine import EmbeddedEngine as EmbeddedEngine
    from penstock.rollout.environments.base import Environment as Environment
    from penstock.rollout.environments.base import Split as Split
    from penstock.rollout.environments.base import Trajectory as Trajectory
    from penstock.rollout.environments.extra_columns import ExtraColumn as ExtraColumn
    from penstock.rollout.environments.turns.multi_turn import Done as Done
    from penstock.rollout.environments.turns.multi_turn import MultiTurnEnvironment as MultiTurnEnvironment
    from penstock.rollout.environments.turns.multi_turn import Observation as Observation
    from penstock.rollout.environments.turns.single_turn import SingleTurnEnvironment as SingleTurnEnvironment
    from penstock.rollout.prompts import Prompt as Prompt
    from penstock.rollout.put_group import put_group as put_group
    from penstock.run.evaluate import EvalResult as EvalResult
    from penstock.run.front_door import evaluate as evaluate
    from penstock.run.front_door import report as report
    from penstock.run.front_door import resume as resume
    from penstock.run.front_door import train as train
    from penstock.run.front_door import verify as verify
    from penstock.run.result import RunResult as RunResult
    from penstock.run.verify.findings import VerifyReport as VerifyReport
    from penstock.training.interface import ChunkResult as ChunkResult
    from penstock.training.interface import StepResult as StepResult
    from penstock.training.workers.local import LocalTrainer as LocalTrainer
    from penstock.weights.synchronizer import WeightSynchronizer as WeightSynchronizer


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
