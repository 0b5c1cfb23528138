"""From settings to an environment of the verifiers package, and from its tasks to prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError

from penstock.config.sections.data import PROCEDURAL_TRAIN_SIZE
from penstock.errors import ConfigError, SetupError
from penstock.rollout.environments.base import Split
from penstock.rollout.environments.verifiers.harness import HARNESS
from penstock.rollout.prompts import Prompt
from penstock.text import named_error

_ARGS = "rollout.environment.args"
_DRAWS_PER_TASK = 50
"""How many tasks of an endless taskset are drawn, per task asked for, to find ones that differ from those held out."""


def load_verifiers(name: str, args: Mapping[str, Any]) -> Any:
    """The environment, with roles that say nothing about it set up to run in this process."""
    if "interception" in args:
        raise ConfigError([f"{_ARGS}.interception: is set by Penstock; remove it"])
    taskset = args.get("taskset", {})
    if not isinstance(taskset, Mapping):
        raise ConfigError([f"{_ARGS}.taskset: expected a mapping of names to values, got {type(taskset).__name__}"])
    raw: dict[str, Any] = {**args, "taskset": {**taskset, "id": name}, "interception": {"type": "server"}}
    try:
        for role, default in _roles(name, str(args.get("id", ""))):
            raw[role] = _role(role, default, raw.get(role, {}), name)
        return vf.load_environment(vf.resolve_env_config(raw))
    except ModuleNotFoundError as error:
        raise ConfigError([f"rollout.environment.kind: {error}"]) from error
    except ValidationError as error:
        raise ConfigError(
            [f"{_ARGS}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        ) from error
    except ConfigError:
        raise
    except BaseException as error:  # an environment's module may do anything while it is imported
        raise ConfigError(
            [f"rollout.environment.kind: verifiers cannot load {name!r}: {named_error(error)}"]
        ) from error


def _roles(name: str, env_id: str) -> Iterator[tuple[str, Any]]:
    for role, definition in vf.env_config_type(name, env_id).model_fields.items():
        if isinstance(definition.default, vf.AgentConfig):
            yield role, definition.default


def _role(role: str, default: Any, given: Any, name: str) -> dict[str, Any]:
    settings = dict(given)
    if "sampling" in settings:
        raise ConfigError([f"{_ARGS}.{role}.sampling: is set by rollout.sampling, for trainer and engine; remove it"])
    chosen = {*settings, *default.model_fields_set}
    if "runtime" not in chosen:
        settings["runtime"] = {"type": "subprocess"}
    if "harness" not in chosen and vf.default_harness_id(name) == "bash":
        settings["harness"] = {"id": HARNESS}
    return settings


def read_tasks(taskset: Any, train_size: int | None, eval_size: int) -> dict[Split, list[Prompt]]:
    """The first `eval_size` tasks, held out, and those after them that repeat none of these."""
    limit = train_size if taskset.bounded else train_size or PROCEDURAL_TRAIN_SIZE
    draws = None if taskset.bounded else (limit or 0) * _DRAWS_PER_TASK
    try:
        tasks = iter(taskset)
        held_out = [_prompt(task) for task in islice(tasks, eval_size)]
        seen = {prompt.facts["content"] for prompt in held_out}
        rest = (_prompt(task) for task in islice(tasks, draws))
        train = list(islice((prompt for prompt in rest if prompt.facts["content"] not in seen), limit))
    except BaseException as error:  # a taskset may load anything from anywhere, and may exit
        raise SetupError(
            f"rollout.environment.kind: the taskset's tasks cannot be loaded: {named_error(error)}"
        ) from error
    if not train or (draws is not None and len(train) < (limit or 0)):
        raise ConfigError([_too_few(len(train), len(held_out), eval_size, limit, draws)])
    return {Split.TRAIN: train, Split.EVAL: held_out}


def _too_few(train: int, held_out: int, eval_size: int, limit: int | None, draws: int | None) -> str:
    if draws is None:
        return f"data.eval_size: {eval_size} held-out tasks leave none of the taskset's {held_out} for training"
    return (
        f"data.eval_size: of {draws} tasks that the taskset made after {eval_size} held-out ones, only {train} differ "
        f"from those, but data.train_size asks for {limit}; the taskset repeats itself: lower either"
    )


def _prompt(task: Any) -> Prompt:
    content = json.dumps(task.data.model_dump(mode="json", exclude={"idx"}), sort_keys=True)
    return Prompt(f"task-{task.data.idx}", task.data.prompt_text, facts={"task": task, "content": content})
