"""What follows from the settings, the data and the device: shared by the checks before a run and by its build."""

from __future__ import annotations

from penstock.config.models import RunConfig
from penstock.errors import ConfigError
from penstock.rollout.prompt_room import PromptRoom


def planned_steps(config: RunConfig, visits: int) -> int:
    """How many steps the run will have if no prompt is dropped: what the data gives, up to `training.max_steps`."""
    n = config.training.prompt_groups_per_step
    steps = visits // n if config.data.partial_step == "drop" else -(-visits // n)
    if steps == 0:
        raise ConfigError(
            [
                f"data.partial_step: drop leaves nothing to train: the data has {visits} prompts in total, and a step "
                f"needs training.prompt_groups_per_step = {n}; use train, or smaller steps"
            ]
        )
    return min(steps, config.training.max_steps or steps)


def lanes_on_gpu(lanes: int, device: str) -> str:
    """Why a GPU's trainer has one lane."""
    return f"runtime.trainer_lanes: {lanes} lanes are only for trainers on the CPU; leave it at 0 on {device}"


def stop_token_problems(config: RunConfig, vocabulary: int) -> list[str]:
    """Stop tokens outside a vocabulary of this size, as `key: reason` lines."""
    outside = [token for token in config.rollout.sampling.stop_token_ids if token >= vocabulary]
    if not outside:
        return []
    return [f"rollout.sampling.stop_token_ids: {outside} are outside the vocabulary of {vocabulary}"]


def prompt_room(config: RunConfig) -> PromptRoom:
    """What happens to prompts that are too long for the engine."""
    return PromptRoom(config.rollout.engine.max_model_len, truncates=config.data.overlong == "truncate_left")
