"""Environments of the user's own: how they are made, and what is wrong with those that are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout
from penstock.rollout.environments import Done, MultiTurnEnvironment, Prompt, PromptData, SingleTurnEnvironment, Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards.pool import RewardPool
from tests.rollout.talking import Talker


class Own(SingleTurnEnvironment):
    """Asks for everything there is."""

    name = "own"

    def __init__(self, pool: RewardPool, data: PromptData, seed: int, scale: float = 1.0) -> None:
        super().__init__(pool)
        self.data, self.seed, self.scale = data, seed, scale

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self.data.train if split is Split.TRAIN else self.data.held_out

    def score(self, prompt: Prompt, response: str) -> float:
        return self.scale * len(response)


class Bare(MultiTurnEnvironment):
    """Asks for nothing."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt("1", "a")] if split is Split.TRAIN else []

    async def step(self, prompt: Prompt, turns: Any) -> Any:
        return {"b": Done(float("nan")), "c": "more", "d": Done("high")}.get(turns[-1].response, Done(1.0))  # type: ignore[arg-type]


class Measuring(Bare):
    """Gives a reward with components, and measures."""

    async def step(self, prompt: Prompt, turns: Any) -> Any:
        return Done({"reward": 1.0, "form": 0.5})

    def sample_metrics(self, prompt: Prompt, turns: Any) -> dict[str, float]:
        return {"letters": len(turns[-1].response)}


class OwnMeasuring(Own):
    """The same in one turn."""

    def score(self, prompt: Prompt, response: str) -> Any:
        return {"reward": 1.0, "form": 0.5}

    def sample_metrics(self, prompt: Prompt, response: str) -> dict[str, float]:
        return {"letters": len(response)}


async def test_components_and_metrics_of_ones_own_environment(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a"}\n', encoding="utf-8")
    for name, turns in (("Measuring", {"turns": 1.0}), ("OwnMeasuring", {})):
        data = DataConfig() if name == "Measuring" else DataConfig(train_path=str(file))
        environment = make_environment(EnvironmentConfig(kind="custom", import_path=f"{__name__}:{name}"), data, seed=0)
        prompt = environment.prompts(Split.TRAIN)[0]
        trajectory = await environment.run(prompt, Talker(lambda text: "four").handle())
        assert (trajectory.reward, trajectory.components) == (1.0, {"form": 0.5})
        assert trajectory.metrics == {**turns, "letters": 4.0}
        await environment.close()


class Broken(Bare):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no licence")


class Exiting(Bare):
    """Ends the program, if it could."""

    def __init__(self) -> None:
        raise SystemExit("no licence")


class NoRun:
    """Is not an environment."""

    name = "none"

    def prompts(self, split: Split) -> list[Prompt]:
        return []

    def close(self) -> None:
        return


class WrongPrompts(Bare):
    """Gives text for prompts."""

    def prompts(self, split: Split) -> Any:
        return ["a"]


class NoDisk(Bare):
    """Cannot give its prompts."""

    def prompts(self, split: Split) -> Any:
        raise OSError("no disk")


class Letters(Bare):
    """Forgets a comma."""

    turn_ends = "</a>"  # type: ignore[assignment]


class Twins(Bare):
    """Gives the same id twice."""

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt("1", "a"), Prompt("1", "b")]


def make(name: str, data: DataConfig | None = None, **environment: Any) -> Any:
    config = EnvironmentConfig(kind="custom", import_path=f"tests.rollout.test_custom:{name}", **environment)
    return make_environment(config, data or DataConfig(), seed=5)


async def test_a_class_gets_its_arguments_and_what_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    made = make("Own", DataConfig(train_path=str(tmp_path / "d.jsonl"), eval_size=7), args={"scale": 2.0})
    assert made.name == "own"
    assert [prompt.text for prompt in made.prompts(Split.TRAIN)] == ["a", "b"]
    own = made.environment
    assert (own.seed, own.data.train_size, own.data.eval_size) == (5, 1024, 7)
    trajectory = await made.run(made.prompts(Split.TRAIN)[0], Talker(lambda text: "four").handle())
    assert trajectory.reward == 8.0
    await made.close()
    await made.close()


async def test_what_it_returns_is_checked() -> None:
    made = make("Bare")
    prompt = made.prompts(Split.TRAIN)[0]
    assert (await made.run(prompt, Talker(lambda text: "a").handle())).reward == 1.0
    for said, match in (
        ("b", "nan"),
        ("c", "step returned str, not an Observation or Done"),
        ("d", "'high', not a num"),
    ):
        with pytest.raises(EnvironmentFailure, match=match):
            await made.run(prompt, Talker(lambda text, s=said: s).handle())


class Slow(Bare):
    """Waits for somebody who does not come."""

    async def step(self, prompt: Prompt, turns: Any) -> Any:
        import asyncio

        await asyncio.Event().wait()


async def test_its_async_code_has_a_time_limit() -> None:
    made = make("Slow", timeout_seconds=0.05)
    with pytest.raises(EnvironmentTimeout, match=r"Slow took longer than 0\.05 s"):
        await made.run(made.prompts(Split.TRAIN)[0], Talker(lambda text: "a").handle())


@pytest.mark.parametrize(
    ("name", "args", "match"),
    [
        ("Bar", {}, "has no class 'Bar'; did you mean Bare?"),
        ("Bare", {"colour": "blue"}, r"cannot be constructed with rollout\.environment\.args \(colour\)"),
        ("Broken", {}, "cannot be constructed: OSError: no licence"),
        ("Exiting", {}, "cannot be constructed: SystemExit: no licence"),
        ("NoRun", {}, "not an environment: it has no method run; it has a close that is not async"),
        ("WrongPrompts", {}, r"prompts\(Split\.TRAIN\) must give a list of Prompt"),
        ("Twins", {}, "two prompts with the same prompt_id"),
        ("MultiTurnEnvironment", {}, "abstract"),
        ("NoDisk", {}, r"prompts\(Split\.TRAIN\) raised OSError: no disk"),
        ("Letters", {}, "turn_ends is the text '</a>', not a tuple"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_reason(name: str, args: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.environment\.import_path: .*{match}"):
        make(name, args=args)


def test_data_that_it_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    file = str(tmp_path / "d.jsonl")
    for given in (
        {"train_path": file},
        {"eval_path": file},
        {"train_size": 5},
        {"eval_size": 5},
        {"eval_path": file, "eval_size": 5},
    ):
        with pytest.raises(ConfigError) as caught:
            make("Bare", DataConfig(**given))
        assert [line.partition(":")[0] for line in caught.value.problems] == [f"data.{key}" for key in given]
        assert all("no parameter named data" in line for line in caught.value.problems)


def test_a_look_at_a_few_prompts_is_not_taken_for_a_size_that_was_set() -> None:
    config = EnvironmentConfig(kind="custom", import_path="tests.rollout.test_custom:Bare")
    made = make_environment(config, DataConfig(eval_size=64), seed=5, at_most=1)
    assert made.name == "Bare"
