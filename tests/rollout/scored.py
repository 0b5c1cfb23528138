"""Environments of reward functions over a few records, and samples that they score."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.rollout.environments import Split, Trajectory
from penstock.rollout.environments.factory import make_environment
from tests.rollout.talking import Talker, tokenizer
from tests.support import column_rewards

HERE = "tests.support.column_rewards"
RECORD = {"question": "2+3?", "solution": "5", "difficulty": 3, "unit": "km", "id": "first"}
Make = Callable[..., Any]


def maker(folder: Path, *, in_process: bool) -> Make:
    def made(
        rewards: str | list[dict[str, Any]],
        *records: dict[str, Any],
        args: dict[str, Any] | None = None,
        timeout: float = 30,
        **data: Any,
    ) -> Any:
        file = folder / "d.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records or (RECORD,)), encoding="utf-8")
        named: dict[str, Any] = (
            {"rewards": rewards} if isinstance(rewards, list) else {"import_path": f"{HERE}:{rewards}"}
        )
        config = EnvironmentConfig.model_validate(
            {
                "kind": "function",
                "workers": 1,
                "in_process": in_process,
                "args": args or {},
                "timeout_seconds": timeout,
                **named,
            }
        )
        keys = {"prompt_key": "question", "answer_key": "solution"} | data
        return make_environment(config, DataConfig(train_path=str(file), **keys), seed=0)

    return made


async def played(environment: Any, response: str = "5", template: str | None = None) -> Trajectory:
    """One sample of the first prompt."""
    prompt = environment.prompts(Split.TRAIN)[0]
    try:
        return await environment.run(prompt, Talker(lambda text: response, tokenizer(template)).handle())
    finally:
        await environment.close()


async def played_group(environment: Any, *responses: str) -> list[Trajectory]:
    """The samples of a group of the first prompt."""
    prompt = environment.prompts(Split.TRAIN)[0]
    handles = [Talker(lambda text, said=said: said).handle() for said in responses]
    try:
        return await environment.run_group(prompt, handles)
    finally:
        await environment.close()


def line_of(text: str) -> int:
    """Where the text stands in the module of rewards."""
    lines = inspect.getsource(column_rewards).splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.strip() == text)
