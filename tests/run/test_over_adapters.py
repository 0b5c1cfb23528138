"""What a run can do, it can do with every adapter of the data plane, and its numbers are `memory`'s to the bit."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.rollout.recorded import Recording
from penstock.run.evaluate import evaluate
from tests.run.conftest import run_config
from tests.run.test_recorded_rollouts import DETERMINISTIC, GROUPS, SAMPLERS
from tests.run.test_resume import cut_back
from tests.run.test_train import lines, steps
from tests.run.verifying import run_verify
from tests.support.adapters import ADAPTERS, OTHERS, others
from tests.support.leftovers import Present, leftovers

TIMED = ("_seconds", "_tflops")
WHOLE_BATCH = {"training.min_groups_per_chunk": 4}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo, by tokens": {
        "algorithm.advantage": {"kind": "grpo", "normalize_std": False},
        "algorithm.loss": {"kind": "ppo_clip", "aggregation": "token_sum_norm", "constant_length": 6},
    },
    "rloo and gspo": {"algorithm.advantage": {"kind": "rloo"}, "algorithm.loss": {"kind": "gspo"}},
    "leave_one_out and cispo": {"algorithm.advantage": {"kind": "leave_one_out"}, "algorithm.loss": {"kind": "cispo"}},
    "max_normalized and reinforce": {
        "algorithm.advantage": {"kind": "max_normalized"},
        "algorithm.loss": {"kind": "reinforce"},
    },
    "batch_whitened": {"algorithm.advantage": {"kind": "batch_whitened"}, **WHOLE_BATCH},
    "reinforce_pp with KL in the reward": {
        "algorithm.advantage": {"kind": "reinforce_pp"},
        "algorithm.kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"},
        **WHOLE_BATCH,
    },
    "reinforce_pp_baseline": {"algorithm.advantage": {"kind": "reinforce_pp_baseline"}, **WHOLE_BATCH},
    "reward and icepop": {"algorithm.advantage": {"kind": "reward"}, "algorithm.correction": {"kind": "icepop"}},
    "KL in the loss, tis": {"algorithm.kl.coefficient": 0.1, "algorithm.correction": {"kind": "tis"}},
    "sequence_masked": {"algorithm.correction": {"kind": "sequence_masked"}},
    "decoupled, in minibatches": {
        "algorithm.correction": {"kind": "decoupled"},
        "training.minibatches_per_step": 2,
        **WHOLE_BATCH,
    },
    "soft overlong, packed": {
        "algorithm.reward": {"overlong": "soft", "overlong_buffer": 3},
        "training.batching": "packed",
    },
    "masked overlong": {"algorithm.reward": {"overlong": "mask"}},
    "LoRA": {"model.lora": {"rank": 2}},
}

Make = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def make(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A run in a folder of its own over 24 prompts whose rewards have spread; no evaluation, no samples shown."""
    root = tmp_path_factory.mktemp("adapters")
    data = root / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": ""}) + "\n" for n in range(GROUPS)))
    numbers = iter(range(10_000))

    def made(adapter: str, **changes: Any) -> RunConfig:
        usual = {
            "data": {"train_path": str(data), "eval_path": str(data)},
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:length"},
            "eval": {"at_start": False, "at_end": False},
            "checkpoint": {"at_end": False, "every_minutes": None},
            "observe": {"console": "off", "samples_per_step": 0},
        }
        return run_config(root / f"{adapter}-{next(numbers)}", model_folder, **usual | ADAPTERS[adapter] | changes)

    return made


def trained(run_dir: Path) -> list[dict[str, float]]:
    """All that was measured of the training of each step, but for times."""
    return [
        {key: value for key, value in step.items() if key.startswith("train/") and not key.endswith(TIMED)}
        for step in steps(run_dir)
    ]


def ends(run_dir: Path) -> Counter[tuple[int, str]]:
    return Counter((line["epoch"], line["prompt_id"]) for line in lines(run_dir / "ledger.jsonl"))


@pytest.fixture(scope="session")
def in_memory(make: Make) -> Callable[[str], list[dict[str, float]]]:
    """What the run of an algorithm measures with rows in the process; computed once."""

    @functools.cache
    def found(algorithm: str) -> list[dict[str, float]]:
        return trained(penstock.train(make("memory", **run_of(algorithm))).run_dir)

    return found


def run_of(algorithm: str) -> dict[str, Any]:
    return DETERMINISTIC | {"training.max_steps": 2} | ALGORITHMS[algorithm]


@pytest.mark.parametrize("adapter", others())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_the_same_numbers_to_the_bit(
    make: Make, in_memory: Callable[[str], list[dict[str, float]]], adapter: str, algorithm: str
) -> None:
    expected = in_memory(algorithm)
    assert len(expected) == 2
    assert any(line["train/grad_norm"] > 0 for line in expected)
    assert trained(penstock.train(make(adapter, **run_of(algorithm))).run_dir) == expected


@pytest.mark.parametrize(
    ("adapter", "sampler"),
    [
        pytest.param(adapter, sampler, marks=() if (adapter, sampler) == ("shm", "windowed") else pytest.mark.long)
        for adapter in OTHERS
        for sampler in SAMPLERS
    ],
)
def test_every_sampler_trains_records_and_replays(make: Make, adapter: str, sampler: str) -> None:
    """Every prompt once, and nothing is left: as with `memory`, also where groups are evicted and generated again."""
    before = Present.now()
    recorded = penstock.train(
        make(adapter, **SAMPLERS[sampler], **{"training.max_steps": None, "rollout.record": True})
    )
    assert set(ends(recorded.run_dir).values()) == {1}
    groups = Recording.read(recorded.run_dir).groups
    replay = {"rollout.replay_from": str(recorded.run_dir), "training.max_steps": None}
    replayed = penstock.train(make(adapter, **SAMPLERS[sampler], **replay))
    assert leftovers(before) == []
    assert set(ends(replayed.run_dir)) == {group.key for group in groups}
    assert replayed.summary["rollout/tokens_generated"] == 0


@pytest.mark.parametrize("adapter", others())
def test_rollouts_only_and_their_replay_have_the_numbers_of_memory(make: Make, adapter: str) -> None:
    found = []
    for name in ("memory", adapter):
        only = DETERMINISTIC | {"training.backend": "none", "rollout.record": True, "training.max_steps": None}
        source = penstock.train(make(name, **only)).run_dir
        replay = DETERMINISTIC | {"rollout.replay_from": str(source), "training.max_steps": None}
        found.append(trained(penstock.train(make(name, **replay)).run_dir))
    assert len(found[0]) == 6
    assert found[0] == found[1]


@pytest.mark.parametrize("adapter", others())
def test_a_recording_of_one_adapter_is_replayed_with_another(make: Make, adapter: str) -> None:
    """It says nothing of where its rows were."""
    only = DETERMINISTIC | {"training.backend": "none", "rollout.record": True, "training.max_steps": None}
    found = []
    for recorder, trainer in ((adapter, "memory"), ("memory", adapter)):
        source = penstock.train(make(recorder, **only)).run_dir
        replay = DETERMINISTIC | {"rollout.replay_from": str(source), "training.max_steps": 2}
        found.append(trained(penstock.train(make(trainer, **replay)).run_dir))
    assert found[0] == found[1]


@pytest.mark.parametrize("adapter", others())
def test_a_run_is_resumed_with_the_numbers_of_one_that_was_not_interrupted(make: Make, adapter: str) -> None:
    settings = {**DETERMINISTIC, "checkpoint": {"at_end": True}}
    whole = penstock.train(make("memory", **settings, **{"training.max_steps": 4})).run_dir
    part = penstock.train(make(adapter, **settings, **{"training.max_steps": 2})).run_dir
    assert penstock.resume(part, ["training.max_steps=4"]).summary["steps"] == 4
    assert trained(part) == trained(whole)
    assert ends(part) == ends(whole)


@pytest.mark.parametrize("adapter", others())
def test_every_prompt_ends_once_where_a_run_is_resumed_with_rows_of_its_checkpoint(make: Make, adapter: str) -> None:
    checkpoints = {"every_steps": 1, "keep_latest": 100, "every_minutes": None}
    config = make(adapter, **SAMPLERS["over_sampling"], **{"training.max_steps": None, "checkpoint": checkpoints})
    run_dir = penstock.train(config).run_dir
    cut_back(run_dir, 2)
    penstock.resume(run_dir)
    found = ends(run_dir)
    assert (len(found), set(found.values())) == (GROUPS, {1})


@pytest.mark.parametrize("adapter", others())
def test_evaluations_during_a_run_and_afterwards_have_the_numbers_of_memory(make: Make, adapter: str) -> None:
    found = []
    for name in ("memory", adapter):
        settings = {**DETERMINISTIC, "training.max_steps": 2, "checkpoint": {"at_end": True}}
        config = make(name, **settings, eval={"at_start": True, "at_end": True, "every_steps": 1})
        run_dir = penstock.train(config).run_dir
        during = [
            {key: value for key, value in line.items() if key.startswith("eval/reward")}
            for line in lines(run_dir / "metrics.jsonl")
        ]
        found.append((during, evaluate(config, run_dir)["eval/reward_mean"]))
    assert any(found[0][0])
    assert found[0] == found[1]


@pytest.mark.parametrize("adapter", others())
def test_verify_passes(make: Make, adapter: str, tmp_path: Path) -> None:
    verified = run_verify(make(adapter), tmp_path)
    assert verified.with_status("fail") == []
    assert verified.checks["data_plane"]["status"] == "pass"
    assert verified.figures("data_plane")["cells"] > 100
