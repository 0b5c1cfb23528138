"""`penstock verify` on runs that are sound: what it says, what it leaves alone, how long it may take."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.models import RunConfig
from penstock.data_plane.meta import KVBatchMeta
from penstock.run.verify.findings import CheckResult, Status
from penstock.run.verify.memory import MEMORY
from penstock.run.verify.mismatch import MISMATCH
from penstock.run.verify.preflight import ON_ROLLOUTS
from penstock.run.verify.preflight import verify as run_checks
from penstock.run.verify.subject import Limits
from penstock.training.workers.local import LocalTrainer
from tests.run.conftest import ConfigMaker
from tests.run.verifying import Verify, run_verify, verify

__all__ = ["verify"]

CHECKS = [*(check for check, _ in ON_ROLLOUTS), MEMORY]


def own_reward(tmp_path: Path, name: str, prompt: str = "say something") -> dict[str, Any]:
    """Settings of a `function` environment with one of the tests' rewards."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "{prompt} {i}", "answer": ""}}\n' for i in range(8)))
    return {
        "rollout.environment": {"kind": "function", "import_path": f"tests.support.rewards:{name}"},
        "data": {"train_path": str(data)},
    }


def test_a_sound_run_passes_every_bar_with_exit_code_0(verify: Verify) -> None:
    verified = verify("--groups", "9")
    assert verified.with_status("fail") == []
    assert verified.figures("rollouts")["groups"] == 4, "a step's worth"
    assert (verified.exit_code, verified.content["ok"]) == (0, True)
    assert verified.figures("gradient_parity")["streamed_relative_difference"] < 1e-5
    assert verified.figures("gradient_parity")["gradient_norm"] > 0
    assert verified.figures("gradient_parity")["weights_changed"] == 0
    assert 0 < verified.figures("logprob_mismatch")["max_abs"] < 1e-4
    assert verified.figures("weight_sync")["wrong"] == 0
    assert verified.figures("data_plane")["rows_left"] == 0


def test_keys_are_the_same_whatever_happens(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = verify()
    monkeypatch.setattr("penstock.run.verify.memory.free_bytes", lambda device: 1)
    unmade = verify()
    for check in CHECKS:
        rows = [verified.checks[check.key] for verified in (sound, unmade)]
        assert rows[0].keys() == rows[1].keys()
        assert [tuple(row["figures"]) for row in rows] == [check.figures] * 2
    assert all(value is not None for value in sound.figures("logprob_mismatch").values())


@pytest.mark.parametrize(
    "changes",
    [
        {"model.lora": {"rank": 2}},
        {"rollout.sampling.top_k": 5, "algorithm.correction": {"kind": "icepop"}},
        *(
            pytest.param(changes, marks=pytest.mark.long)
            for changes in (
                {"model.dtype": "float64"},
                {
                    "algorithm.kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"},
                    "training.min_groups_per_chunk": 2,
                },
                {"training.batching": "packed", "training.gradient_checkpointing": True},
                {"training.minibatches_per_step": 2, "training.min_groups_per_chunk": 4},
                {"training.prompt_groups_per_step": 1},
            )
        ),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_change_the_computation_pass_too(verify: Verify, changes: dict[str, Any]) -> None:
    verified = verify(**changes)
    assert verified.with_status("fail") == []
    assert verified.figures("gradient_parity")["gradient_norm"] > 0


def test_float64_gradients_agree_to_twelve_digits(verify: Verify) -> None:
    row = verify(**{"model.dtype": "float64", "training.min_groups_per_chunk": 2}).checks["gradient_parity"]
    assert row["bars"]["streamed_relative_difference"] == 1e-12
    assert row["figures"]["by_group_relative_difference"] < 1e-12
    assert row["figures"]["streamed_chunks"] == 2


def test_nothing_is_written_even_where_rollouts_are_recorded(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = make_config(**{"rollout.record": True})
    assert run_verify(config, tmp_path).exit_code == 0
    assert not Path(config.run_dir).exists()


def test_no_thread_is_left_running(verify: Verify) -> None:
    before = set(threading.enumerate())
    verify()
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith(("engine", "trainer"))]
    for thread in left:
        thread.join(timeout=10)
    assert [thread.name for thread in left if thread.is_alive()] == []


def test_no_more_groups_are_generated_than_asked_for(verify: Verify) -> None:
    assert verify("--groups", "2").figures("rollouts")["groups"] == 2


def rows_within(config: RunConfig, seconds: float) -> dict[str, CheckResult]:
    """The rows of a preflight that may take so long."""
    return {row.check.key: row for row in run_checks(config, Limits(seconds=seconds)).rows}


def test_groups_that_are_late_are_given_up(make_config: ConfigMaker) -> None:
    rows = rows_within(make_config(), 1e-6)
    assert rows["rollouts"].finding.figures["late"] == 4
    assert "--seconds" in rows["rollouts"].explanation
    assert rows["rollouts"].failed
    assert rows["gradient_parity"].finding.status is Status.SKIP
    assert not rows["memory"].failed


def test_a_check_that_hangs_ends_and_leaves_time_for_the_others(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hanging(self: LocalTrainer, meta: KVBatchMeta, field_name: str) -> None:
        await asyncio.Event().wait()

    given: list[float | None] = []
    begun: list[str] = []
    real = asyncio.timeout

    def timeout(seconds: float | None) -> asyncio.Timeout:
        """Notes the limit that the hanging check is given, and has the test wait for a moment only."""
        if given or begun[-1] != f"checking: {MISMATCH.title}":
            return real(seconds)
        given.append(seconds)
        return real(0.2)

    monkeypatch.setattr(LocalTrainer, "compute_logprobs", hanging)
    monkeypatch.setattr("penstock.run.verify.preflight.asyncio.timeout", timeout)
    report = run_checks(make_config(), Limits(seconds=600.0), begun.append)
    [failed] = [row for row in report.rows if row.failed]
    assert failed.check.key == "logprob_mismatch"
    assert "--seconds" in failed.explanation
    [limit] = given
    assert limit is not None
    assert 0 < limit <= 300, "half of the time is left for the others"


class TestWarnings:
    def test_rewards_without_spread_warn_and_the_gradients_are_checked_all_the_same(
        self, verify: Verify, tmp_path: Path
    ) -> None:
        verified = verify(**own_reward(tmp_path, "constant"))
        assert verified.exit_code == 0
        assert "reward_spread" in verified.with_status("warn")
        figures = verified.figures("gradient_parity")
        assert figures["random_advantages"] is True
        assert figures["gradient_norm"] > 0
        assert "random" in verified.checks["gradient_parity"]["notes"][0]

    def test_spread_is_seen(self, verify: Verify, tmp_path: Path) -> None:
        verified = verify(**own_reward(tmp_path, "length"))
        assert verified.figures("reward_spread")["groups_with_spread"] > 0
        assert verified.figures("gradient_parity")["random_advantages"] is False

    def test_responses_that_are_all_cut_off_warn(self, verify: Verify) -> None:
        verified = verify(**{"rollout.sampling.max_new_tokens": 1})
        assert "truncation" in verified.with_status("warn")
        assert verified.figures("truncation")["rate"] > 0.5
        assert "max_new_tokens" in verified.checks["truncation"]["explanation"]

    @pytest.mark.parametrize(("budget", "status", "code"), [(8, "warn", 0), (0, "fail", 1)])
    def test_a_reward_that_raises_for_some_prompts_says_why_and_fails_without_a_budget(
        self, verify: Verify, tmp_path: Path, budget: int, status: str, code: int
    ) -> None:
        settings = own_reward(tmp_path, "raising") | {"rollout.failure.max_dropped_prompts": budget}
        (tmp_path / "prompts.jsonl").write_text(
            "".join(f'{{"prompt": "{word} {i}", "answer": ""}}\n' for i, word in enumerate(["fail", "fine"] * 4))
        )
        verified = verify(**settings)
        assert verified.exit_code == code
        assert "rewards" in verified.with_status(status)
        assert "this prompt has no reward" in verified.checks["rewards"]["explanation"]


def test_a_reward_that_raises_for_all_prompts_fails_and_what_needs_rollouts_is_skipped(
    verify: Verify, tmp_path: Path
) -> None:
    verified = verify(**own_reward(tmp_path, "raising", "fail"))
    assert verified.exit_code == 1
    assert "this prompt has no reward" in verified.checks["rollouts"]["explanation"]
    assert verified.with_status("fail") == ["rollouts"]
    assert verified.with_status("pass") == ["data_plane", "memory"]
    assert {"gradient_parity", "weight_sync", "reward_spread"} <= set(verified.with_status("skip"))


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"training.backend": "none", "rollout.record": True}, "training.backend")],
)
def test_a_run_without_a_trainer_is_refused(
    make_config: ConfigMaker, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    verified = run_verify(make_config(**changes), tmp_path)
    assert verified.exit_code == 2
    assert verified.content["error"]["problems"][0]["key"] == key


def test_it_begins_with_the_checks_of_config_check(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.run.verify.preflight.run_loop", lambda _: pytest.fail("nothing is to be built"))
    wrong = {"rollout.engine.max_model_len": 4096, "rollout.sampling.stop_token_ids": [10**6]}
    verified = run_verify(make_config(**wrong), tmp_path)
    assert verified.exit_code == 2
    told = {problem["key"] for problem in verified.content["error"]["problems"]}
    assert told == {"rollout.engine.max_model_len", "rollout.sampling.stop_token_ids"}


def test_warnings_about_settings_are_shown_once(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(staleness={"policy": "windowed", "max_staleness": 1})
    report = run_checks(config, Limits(groups=1))
    monkeypatch.setattr("penstock.run.verify.preflight.verify", lambda *_: report)
    verified = run_verify(config, tmp_path)
    assert [warning["key"] for warning in verified.content["warnings"]] == ["staleness.max_staleness"]
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "verify.yaml")])
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: staleness.max_staleness: groups up to 1 version old may be trained")
    assert done.output.count("may be trained without a correction") == 1
