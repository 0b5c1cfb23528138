"""Prompts that leave no room for a response: told, skipped or cut, as `data.overlong` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import OverlongData, SetupError
from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory
from penstock.rollout.prompt_room import PromptRoom
from penstock.rollout.prompts import Prompt
from penstock.run.evaluate import evaluate
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines, steps

CONTEXT, NEW = 96, 6
"""Those of `make_config`; the tokenizer has one token per character."""
QUIET = {"eval.at_start": False, "eval.at_end": False}


def written(path: Path, lengths: list[int]) -> str:
    texts = [(f"{i:03d}" * length)[:length] for i, length in enumerate(lengths)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def overlong_run(make_config: ConfigMaker, tmp_path: Path, mode: str, lengths: list[int], **changes: Any) -> Any:
    return make_config(
        **{
            "data": {"train_path": written(tmp_path / "train.jsonl", lengths), "overlong": mode, "shuffle": False},
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:length"},
            "training.max_steps": None,
            **QUIET,
            **changes,
        }
    )


def ends(run_dir: Path) -> dict[str, str]:
    return {line["prompt_id"]: line["end"] for line in lines(run_dir / "ledger.jsonl")}


LENGTHS = [5, 5, CONTEXT, 5, CONTEXT - 1, 5, 300, 5]
"""Prompts 3 and 7 are too long; behind prompt 5 there is room for one token."""


def test_room_is_a_single_new_token() -> None:
    room = PromptRoom(10, truncates=True)
    assert room.fit(tuple(range(9)), 4) == tuple(range(9))
    assert room.fit(tuple(range(10)), 4) == (4, 5, 6, 7, 8, 9)
    assert PromptRoom(10).fit(tuple(range(10)), 4) == tuple(range(10))


def test_error_stops_before_the_first_step_and_counts_them_all(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = overlong_run(make_config, tmp_path, "error", LENGTHS)
    with pytest.raises(
        SetupError, match=r"2 of 8 training prompts .*300 tokens.*'3'.*max_model_len = 96.*truncate_left"
    ):
        penstock.train(config)
    assert steps(Path(config.run_dir)) == []
    assert not (Path(config.run_dir) / "ledger.jsonl").read_text()


def test_error_looks_at_held_out_prompts_where_they_are_evaluated(make_config: ConfigMaker, tmp_path: Path) -> None:
    held_out = {"data.eval_path": written(tmp_path / "eval.jsonl", [5, 200])}
    config = overlong_run(make_config, tmp_path, "error", [5] * 4, **held_out, **{"eval.at_end": True})
    for stopped in (penstock.train, evaluate):
        with pytest.raises(SetupError, match="1 of 2 held-out prompts"):
            stopped(config)


def test_drop_skips_them_and_spends_no_budget(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = overlong_run(make_config, tmp_path, "drop", LENGTHS, **{"training.prompt_groups_per_step": 3})
    result = penstock.train(config)
    trained = {str(i + 1): "trained" for i in range(8)}
    assert ends(result.run_dir) == trained | {"3": "dropped_overlong", "7": "dropped_overlong"}
    last = steps(result.run_dir)[-1]
    assert (last["data/overlong_dropped"], last["rollout/prompts_dropped"], last["failures/retried_data"]) == (2, 0, 0)
    assert result.summary["data/overlong_dropped"] == 2
    assert result.summary["steps"] == 2
    told = [line for line in lines(result.run_dir / "events.jsonl") if line["event"] == "prompt_overlong"]
    assert [line["prompt_id"] for line in told] == ["3", "7"]
    assert "leaves no room for a response" in (result.run_dir / "report.html").read_text(encoding="utf-8")


def test_drop_leaves_held_out_prompts_out_and_counts_them(make_config: ConfigMaker, tmp_path: Path) -> None:
    held_out = {"data.eval_path": written(tmp_path / "eval.jsonl", [5, 200, 6])}
    changes = {**held_out, "eval.at_end": True, "training.max_steps": 1}
    result = penstock.train(overlong_run(make_config, tmp_path, "drop", [5] * 4, **changes))
    [evaluation] = [line for line in lines(result.run_dir / "metrics.jsonl") if "eval/reward_mean" in line]
    assert (evaluation["eval/overlong_dropped"], evaluation["eval/failures"], evaluation["eval/responses"]) == (1, 0, 2)


@pytest.mark.parametrize(("mode", "dropped", "cut"), [("drop", 1, 0), ("truncate_left", 0, 1)])
def test_eval_tells_how_many_prompts_were_left_out_or_cut(
    make_config: ConfigMaker, tmp_path: Path, mode: str, dropped: int, cut: int
) -> None:
    held_out = {"data.eval_path": written(tmp_path / "eval.jsonl", [5, 200, 6]), "eval.samples_per_prompt": 2}
    held_out |= {"eval.greedy": False}
    figures = evaluate(overlong_run(make_config, tmp_path, mode, [5] * 4, **held_out))
    assert (figures["eval/overlong_dropped"], figures["eval/overlong_truncated"]) == (dropped, cut)
    assert (figures["prompts"], figures["eval/failures"]) == (3 - dropped, 0)


def test_eval_shows_where_a_reward_raised_once_for_each_cause(
    make_config: ConfigMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "fail", "fail too")))
    environment = {"kind": "function", "import_path": "tests.support.column_rewards:picky"}
    changes = {"data.eval_path": str(held_out), "rollout.environment": environment}
    figures = evaluate(overlong_run(make_config, tmp_path, "error", [5] * 4, **changes))
    assert figures["eval/failures"] == 2
    shown = capsys.readouterr().err
    assert shown.count("in convert") == shown.count('raise KeyError("no such unit")') + 1 == 2
    assert "column_rewards.py" in shown


def test_truncate_left_keeps_the_last_tokens_and_counts(make_config: ConfigMaker, tmp_path: Path) -> None:
    changes = {"rollout.record": True}
    result = penstock.train(overlong_run(make_config, tmp_path, "truncate_left", LENGTHS, **changes))
    assert set(ends(result.run_dir).values()) == {"trained"}
    assert steps(result.run_dir)[-1]["data/overlong_truncated"] == 2
    assert result.summary["data/overlong_truncated"] == 2
    groups = [json.loads(path.read_text()) for path in (result.run_dir / "rollouts").glob("*/group.json")]
    cut = {group["prompt_id"]: group for group in groups}["7"]
    prompts = {
        length - tag["response_length"] for length, tag in zip(cut["sequence_lengths"], cut["tags"], strict=True)
    }
    assert prompts == {CONTEXT - NEW}


class OwnWords:
    """Adds words of its own to every prompt, which nobody can foresee."""

    name = "own"

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(str(i), "go") for i in range(8)]

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        ids = handle.encode("x" * (200 if prompt.prompt_id == "5" else 8))
        generation = await handle.generate(ids)
        text = handle.decode(generation.token_ids)
        return Trajectory((Segment(ids), Segment(generation.token_ids, generation)), 1.0, text)

    async def close(self) -> None:
        return


@pytest.mark.parametrize("mode", ["error", "drop"])
def test_prompts_that_only_their_environment_knows_are_found_when_they_are_dispatched(
    make_config: ConfigMaker, mode: str
) -> None:
    config = make_config(
        **{
            "data": {"overlong": mode, "shuffle": False},
            "rollout.environment": {"kind": "custom", "import_path": f"{__name__}:OwnWords"},
            "training.max_steps": None,
            **QUIET,
        }
    )
    if mode == "drop":
        assert ends(penstock.train(config).run_dir)["5"] == "dropped_overlong"
        return
    with pytest.raises(OverlongData, match=r"data\.overlong: prompt 0:5 .*200 tokens.*set data\.overlong to drop"):
        penstock.train(config)
    assert "5" not in ends(Path(config.run_dir))
    run = penstock.resume(config.run_dir, ["data.overlong=drop"])
    assert ends(run.run_dir) == {str(i): "dropped_overlong" if i == 5 else "trained" for i in range(8)}
