"""`penstock.train` and its siblings: settings in any form, functions and classes in place of names."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import given
from penstock.buffer.samplers.windowed import Windowed
from penstock.config.reading.loading import dump_config, load_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.errors import ConfigError, SetupError
from penstock.rollout.environments import Prompt, SingleTurnEnvironment, Split
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.run.given_objects import GivenObjects
from tests.run.conftest import ConfigMaker
from tests.support.rewards import length, letters


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.fixture
def data_config(make_config: ConfigMaker, tmp_path: Path) -> penstock.RunConfig:
    """A run of two steps over a file of prompts, which are also held out."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(24)))
    environment = {"kind": "math", "timeout_seconds": 7}
    return make_config(
        **{
            "data": {"train_path": str(prompts), "eval_path": str(prompts), "eval_size": 4},
            "rollout.environment": environment,
            "training.max_steps": 2,
            "eval": {"at_start": False, "at_end": False},
        }
    )


def test_a_function_that_can_be_imported_is_saved_under_its_name_and_runs_in_a_process(
    data_config: penstock.RunConfig,
) -> None:
    result = penstock.train(data_config, reward=letters)
    saved = load_config(result.run_dir / "config.yaml").rollout.environment
    assert (saved.kind, saved.import_path) == ("function", "tests.support.rewards:letters")
    assert saved.timeout_seconds == 7
    assert result.summary["steps"] == 2
    assert events(result.run_dir, "reward_in_process") == []


def test_a_closure_is_called_for_every_response_stays_here_and_is_said_to(data_config: penstock.RunConfig) -> None:
    seen: list[str] = []

    def counted(prompt: str, response: str, answer: str) -> float:
        seen.append(prompt)
        return float(len(response))

    result = penstock.train(data_config, reward=counted)
    assert len(seen) >= 2 * 4 * 3
    (told,) = events(result.run_dir, "reward_in_process")
    assert told["function"] == "penstock.given:counted"
    assert result.summary["train/reward_mean_end"] > 0
    assert given.is_lost("penstock.given:counted")


def test_a_resume_needs_the_function_again_and_says_so_otherwise(data_config: penstock.RunConfig) -> None:
    def first(prompt: str, response: str, answer: str) -> float:
        return float(len(response))

    run_dir = penstock.train(data_config, reward=first).run_dir
    with pytest.raises(
        ConfigError, match=r"given from Python.*again, from Python: penstock\.resume\(.*, reward=\.\.\.\)"
    ):
        penstock.resume(run_dir, ["training.max_steps=3"])
    result = penstock.resume(run_dir, ["training.max_steps=3"], reward=first)
    assert result.summary["steps"] == 3


@pytest.mark.long
def test_the_command_line_cannot_resume_what_only_python_has(data_config: penstock.RunConfig) -> None:
    run_dir = penstock.train(data_config, reward=lambda prompt, response, answer: len(response)).run_dir
    command = [sys.executable, "-m", "penstock.cli", "resume", str(run_dir), "training.max_steps=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "rollout.environment.import_path: lambda is an object that was given from Python" in done.stderr
    assert "reward=...)" in done.stderr
    assert "Traceback" not in done.stderr
    check = [
        sys.executable,
        "-m",
        "penstock.cli",
        "config",
        "check",
        str(run_dir / "config.yaml"),
        f"run_dir={run_dir}2",
    ]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert "rollout.environment.import_path: lambda is an object that was given from Python" in done.stderr


class Digits(SingleTurnEnvironment):
    """Prompts of its own; a class that another process can import, but need not."""

    def __init__(self, pool: RewardPool, seed: int, largest: int = 9) -> None:
        super().__init__(pool)
        self._prompts = [Prompt(f"p{i}", f"{(seed + i) % (largest + 1)}=", str(i)) for i in range(16)]

    @property
    def name(self) -> str:
        return "digits"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts if split is Split.TRAIN else self._prompts[:4]

    def score(self, prompt: Prompt, response: str) -> object:
        return letters(prompt.text, response, prompt.answer)


def test_classes_take_the_place_of_environment_and_staleness_policy(make_config: ConfigMaker) -> None:
    made: list[int] = []

    class Policy(Windowed):
        def __init__(self, prompt_groups_per_step: int) -> None:
            made.append(prompt_groups_per_step)
            super().__init__(prompt_groups_per_step, 1)

    config = make_config(**{"data": None, "training.max_steps": 2, "algorithm.correction": {"kind": "tis"}})
    result = penstock.train(config, environment=Digits, staleness=Policy)
    assert result.summary["steps"] == 2
    assert 4 in made
    saved = parse_yaml((result.run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert saved["rollout"]["environment"]["import_path"] == "tests.run.test_from_python:Digits"
    assert saved["staleness"]["import_path"] == "penstock.given:Policy"
    with pytest.raises(ConfigError, match=r"staleness\.import_path.*staleness=\.\.\."):
        penstock.resume(result.run_dir, ["training.max_steps=3"])

    class Other(Policy):
        pass

    with pytest.raises(ConfigError, match=r"staleness\.import_path: is now penstock\.given:Other"):
        penstock.resume(result.run_dir, ["training.max_steps=3"], staleness=Other)
    assert penstock.resume(result.run_dir, ["training.max_steps=3"], staleness=Policy).summary["steps"] == 3


class Centred:
    """An advantage estimator: rewards less their mean."""

    def __call__(self, scores: Any) -> Any:
        return scores.rewards_S - scores.rewards_S.mean()


def test_a_function_is_the_loss_and_a_class_the_advantage(data_config: penstock.RunConfig) -> None:
    seen: list[int] = []

    def surrogate(tokens: Any) -> Any:
        seen.append(len(tokens.advantages_T))
        return -tokens.advantages_T * tokens.logprobs_T

    result = penstock.train(data_config, reward=letters, loss=surrogate, advantage=Centred)
    assert result.summary["steps"] == 2
    assert seen
    saved = parse_yaml((result.run_dir / "config.yaml").read_text(encoding="utf-8"))["algorithm"]
    assert saved["loss"]["import_path"] == "penstock.given:surrogate"
    assert saved["advantage"]["import_path"] == "tests.run.test_from_python:Centred"
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.import_path: surrogate .*, loss=\.\.\."):
        penstock.resume(result.run_dir, ["training.max_steps=3"])
    assert penstock.resume(result.run_dir, ["training.max_steps=3"], loss=surrogate).summary["steps"] == 3


def test_several_functions_are_weighed(data_config: penstock.RunConfig) -> None:
    def two(response: str) -> float:
        return 2.0

    def three(response: str) -> float:
        return 3.0

    result = penstock.evaluate(data_config, reward=[two, (three, 0.5)])
    assert result.reward_mean == 3.5
    assert result.components == {"two": 2.0, "three": 3.0}


def test_settings_may_be_a_config_a_path_or_a_mapping_with_overrides(
    data_config: penstock.RunConfig, tmp_path: Path
) -> None:
    config = data_config
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    mapping = parse_yaml(dump_config(config))
    overrides = ["eval.max_new_tokens=2", "data.eval_size=3"]
    forms: list[Any] = [config, file, str(file), mapping]
    results = [penstock.evaluate(form, overrides, reward=lambda response, **rest: len(response)) for form in forms]
    assert [result.prompts for result in results] == [3] * 4
    assert len({result.reward_mean for result in results}) == 1
    assert results[0].response_length_mean <= 2
    assert results[0].model == config.model.path
    assert "max_new_tokens: 2" not in dump_config(config)


def test_a_mapping_needs_no_environment_where_a_reward_is_given(data_config: penstock.RunConfig) -> None:
    settings = parse_yaml(dump_config(data_config))
    del settings["rollout"]["environment"]
    result = penstock.evaluate(settings, reward=lambda prompt, response, answer: 2.5)
    assert result.reward_mean == 2.5
    assert (result.prompts, result.failures) == (4, ())


def test_results_are_frozen_and_a_run_is_evaluated_and_reported_by_its_folder(data_config: penstock.RunConfig) -> None:
    def reward(prompt: str, response: str, answer: str) -> float:
        return float(len(response))

    trained = penstock.train(data_config, ["training.max_steps=1", "eval.at_end=true"], reward=reward)
    with pytest.raises(ConfigError, match=r"again, from Python: penstock\.evaluate\(\.\.\., reward=\.\.\.\)"):
        penstock.evaluate(trained.run_dir)
    for override in ("model.path=/nonexistent", "model={path: /nonexistent}"):
        with pytest.raises(ConfigError, match=r"model.path: cannot be set with the folder of a run"):
            penstock.evaluate(trained.run_dir, [override], reward=reward)
    with pytest.raises(SetupError, match=r"already holds a run.*from_scratch=True"):
        penstock.train(data_config, reward=reward)
    assert trained.resume_command == f"penstock.resume({str(trained.run_dir)!r}, reward=...)"
    evaluated = penstock.evaluate(trained.run_dir, checkpoint="step_1", reward=reward)
    assert evaluated.model.endswith("step_1")
    assert evaluated.reward_mean == pytest.approx(trained.summary["eval/reward_mean"])
    written = penstock.report(trained.run_dir, trained.run_dir / "page.html")
    assert written.path.read_bytes().startswith(b"<!")
    for result in (trained, evaluated, written):
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.extra = 1  # type: ignore[union-attr]


def test_verify_checks_a_run_with_the_function_it_was_given(data_config: penstock.RunConfig) -> None:
    told: list[str] = []
    report = penstock.verify(
        data_config, groups=2, notify=told.append, reward=lambda prompt, response, answer: len(response) % 2
    )
    assert report.ok
    assert any("generating" in text for text in told)
    assert not Path(data_config.run_dir).exists()


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"reward": 3}, "reward: give a function, or a list of functions, .*, not 3"),
        ({"staleness": "windowed"}, "staleness: give a function or a class, not 'windowed'"),
        ({"reward": [letters, (letters, 0.5)]}, "letters: two objects have this name"),
        ({"reward": letters, "environment": Digits}, "use only one of them"),
        ({"environment": Counter}, "Counter is not an environment: it has no method prompts; it has no method run"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    data_config: penstock.RunConfig, objects: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        penstock.train(data_config, **objects)
    with pytest.raises(TypeError, match="loggers go to loggers="):
        penstock.train(data_config, [object()])  # type: ignore[list-item]


def test_sections_keep_what_belongs_to_every_choice() -> None:
    def shortest(response: str) -> float:
        return -float(len(response))

    settings = {
        "rollout": {"environment": {"kind": "math", "args": {"wrong": -1}, "workers": 2}},
        "staleness": {"policy": "custom", "import_path": "old:Policy", "args": {"window": 2}},
        "algorithm": {"loss": {"kind": "ppo_clip", "aggregation": "sequence_mean", "clip_ratio_low": 0.1}},
    }
    sections = GivenObjects(reward=shortest, staleness=Windowed, loss=letters).sections(settings)
    assert sections == {
        "rollout.environment": {"kind": "function", "import_path": "penstock.given:shortest", "workers": 2},
        "staleness": {
            "policy": "custom",
            "import_path": "penstock.buffer.samplers.windowed:Windowed",
            "args": {"window": 2},
        },
        "algorithm.loss": {
            "kind": "custom",
            "import_path": "tests.support.rewards:letters",
            "aggregation": "sequence_mean",
        },
    }


def test_several_rewards_have_weights_and_keep_the_settings_they_had() -> None:
    had = {"import_path": "tests.support.rewards:letters", "weight": 3.0, "args": {"x": 1}}
    settings = {"rollout": {"environment": {"kind": "function", "rewards": [had]}}}
    (section,) = GivenObjects(reward=[letters, (length, 0.5)]).sections(settings).values()
    assert section["rewards"] == [had, {"import_path": "tests.support.rewards:length", "weight": 0.5}]
    (single,) = GivenObjects(reward=length).sections(settings).values()
    assert single == {"kind": "function", "import_path": "tests.support.rewards:length"}


def test_two_calls_at_once_may_share_an_object_but_not_a_name() -> None:
    def one() -> None: ...

    def other() -> None: ...

    other.__name__ = "one"
    path = given.import_path(one)
    with given.available({path: one}):
        with given.available({path: one}):
            assert not given.is_lost(path)
        assert not given.is_lost(path)
        with pytest.raises(ConfigError, match="different object of this name"), given.available({path: other}):
            pass
    assert given.is_lost(path)


def test_an_object_stays_until_the_last_of_two_overlapping_calls_has_ended() -> None:
    def one() -> None: ...

    path = given.import_path(one)
    first, second = given.available({path: one}), given.available({path: one})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not given.is_lost(path)
    second.__exit__(None, None, None)
    assert given.is_lost(path)


def test_lambdas_and_partials_have_numbers_and_rewards_any_settings() -> None:
    def grouped(response: list[str]) -> list[float]:
        return [0.0] * len(response)

    first, second = (lambda response: 1.0), (lambda response: 2.0)
    objects = GivenObjects(reward=[first, (second, 0.5), {"function": grouped, "batched": True, "weight": 2.0}])
    (section,) = objects.sections({}).values()
    assert section["rewards"] == [
        {"import_path": "penstock.given:lambda"},
        {"import_path": "penstock.given:lambda_2", "weight": 0.5},
        {"import_path": "penstock.given:grouped", "batched": True, "weight": 2.0},
    ]
    assert list(objects.by_path.values()) == [first, second, grouped]


def test_a_batched_function_gets_its_groups(data_config: penstock.RunConfig) -> None:
    sizes: list[int] = []

    def grouped(response: list[str]) -> list[float]:
        sizes.append(len(response))
        return [float(len(each)) for each in response]

    result = penstock.train(data_config, ["training.max_steps=1"], reward=[{"function": grouped, "batched": True}])
    assert result.summary["steps"] == 1
    assert set(sizes) == {data_config.rollout.group_size}


def test_settings_that_a_given_loss_does_not_have_are_said_to(data_config: penstock.RunConfig) -> None:
    def surrogate(tokens: Any) -> Any:
        return -tokens.logprobs_T

    for overrides in (["algorithm.loss.clip_ratio_high=0.3"], ["algorithm.loss={clip_ratio_high: 0.3}"]):
        with pytest.raises(ConfigError, match=r"algorithm.loss.clip_ratio_high: belongs to the built-in .*loss=\.\.\."):
            penstock.train(data_config, overrides, loss=surrogate)


def test_overrides_of_the_same_call_are_meant_for_the_object(data_config: penstock.RunConfig) -> None:
    seen: list[float] = []

    def scored(response: str, worth: float) -> float:
        seen.append(worth)
        return worth

    assert data_config.rollout.environment.kind == "math"
    penstock.evaluate(data_config, ["rollout.environment.args={worth: 2.5}"], reward=scored)
    assert set(seen) == {2.5}


def test_a_run_that_is_interrupted_says_how_to_resume_it(
    data_config: penstock.RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    once = threading.Lock()

    def stopping(response: str) -> float:
        # Once: a second Ctrl-C ends the run without waiting for anything.
        if threading.current_thread() is not threading.main_thread() and once.acquire(blocking=False):
            signal.raise_signal(signal.SIGINT)
        return 1.0

    result = penstock.train(data_config, ["observe.console=plain", "training.max_steps=10000"], reward=stopping)
    assert result.stopped_by == "interrupted"
    assert f"resume with: penstock.resume({str(result.run_dir)!r}, reward=...)\n" in capsys.readouterr().err
