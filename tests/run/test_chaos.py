"""The chaos benchmark: its faults are reproducible and noted, its counts are right, and a run survives all of it."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.chaos_blows import Blow, flip_a_byte, plan_blows
from benchmarks.support.chaos_faults import AT_MOST, ATTEMPTS, KINDS_AT, Fault, FaultPlan, Injector, Kind, Notes, Site
from benchmarks.support.chaos_outcome import GROUP_SIZE, Load, Outcome, lines
from benchmarks.support.chaos_process import Faulty, FaultyDataPlane
from benchmarks.support.chaos_rewards import Injected, score
from benchmarks.support.chaos_run import ROOT, ChaosRun
from penstock.data_plane.field_spec import fixed
from tests.support.tiny_models import save_tiny_model

CALLS = 400


def struck(plan: FaultPlan, site: Site) -> list[tuple[Kind, int]]:
    return [(kind, call) for call in range(CALLS) for kind in KINDS_AT[site] if plan.strikes(site, kind, call)]


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    notes = Notes(tmp_path / "notes.jsonl", 3)
    yield notes
    notes.close()


@settings(max_examples=20)
@given(st.integers(), st.integers(0, 9), st.sampled_from(Site))
def test_every_process_has_every_kind_early_however_low_the_rate(seed: int, process: int, site: Site) -> None:
    early = {kind for kind, call in struck(FaultPlan(seed, process, 1e-9), site) if call < 40}
    assert early == set(KINDS_AT[site])


@settings(max_examples=20)
@given(st.integers(), st.sampled_from(Site))
def test_the_same_seed_and_process_have_the_same_faults(seed: int, site: Site) -> None:
    assert struck(FaultPlan(seed, 1, 0.05), site) == struck(FaultPlan(seed, 1, 0.05), site)


def test_another_seed_or_process_has_other_faults() -> None:
    plans = [FaultPlan(0, 0, 0.05), FaultPlan(0, 1, 0.05), FaultPlan(1, 0, 0.05)]
    assert len({tuple(struck(plan, Site.ENGINE)) for plan in plans}) == 3


def test_the_rate_is_the_share_of_calls_of_each_kind() -> None:
    found = Counter(kind for kind, _ in struck(FaultPlan(0, 0, 0.1), Site.ENGINE))
    assert all(0.05 * CALLS < found[kind] < 0.15 * CALLS for kind in KINDS_AT[Site.ENGINE])


def test_a_run_without_faults_has_none() -> None:
    assert not any(struck(FaultPlan(0, 0, 0.0), site) for site in Site)


def test_nothing_strikes_before_the_injector_is_armed(notes: Notes) -> None:
    injector = Injector(FaultPlan(0, 0, 1.0), notes)
    assert injector.draw(Site.PUT, "prompt") is None
    injector.arm()
    assert injector.draw(Site.PUT, "prompt") == Fault(Kind.DATA_PLANE_PUT, 0)


def test_a_victim_keeps_enough_attempts_to_come_through(notes: Notes) -> None:
    injector = Injector(FaultPlan(0, 0, 1.0), notes)
    injector.arm()
    faults = [injector.draw(Site.FINISH, "step") for _ in range(2 * ATTEMPTS)]
    assert sum(fault is not None for fault in faults) == AT_MOST < ATTEMPTS
    assert injector.draw(Site.FINISH, "another") is not None
    injector.forgive("step")
    assert injector.draw(Site.FINISH, "step") is not None


def test_a_fault_is_on_file_when_it_strikes(notes: Notes, tmp_path: Path) -> None:
    injector = Injector(FaultPlan(0, 0, 1.0), notes)
    injector.arm()
    injector.draw(Site.MICROBATCH, "step")
    (line,) = lines(tmp_path / "notes.jsonl")
    assert (line["note"], line["process"], line["kind"], line["call"]) == ("fault", 3, "trainer_microbatch", 0)


@pytest.fixture
def always(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> Injector:
    """Every call is struck, as long as its victim's attempts last."""
    injector = Injector(FaultPlan(0, 0, 1.0), notes)
    injector.arm()
    monkeypatch.setattr(Faulty, "injector", injector, raising=False)
    monkeypatch.setattr(Faulty, "prompt_of", {}, raising=False)
    return injector


def test_a_failed_write_is_lost_or_done_in_turns(always: Injector) -> None:
    plane = FaultyDataPlane()
    plane.register_partition("p", [fixed("reward", "float32")])
    for sample, rows in (("group0_g0", 0), ("group1_g0", 1)):
        with pytest.raises(ConnectionAbortedError):
            plane.put_samples([sample], {"reward": torch.zeros(1)}, "p")
        assert plane.count_samples("p") == rows


@pytest.mark.parametrize("kind", [Kind.ENVIRONMENT_RAISES, Kind.ENVIRONMENT_NAN])
def test_a_reward_that_is_struck_is_none(kind: Kind) -> None:
    try:
        value = score("12", "12", kind.value)
    except Injected:
        value = float("nan")
    assert math.isnan(value)
    assert score("12", "12", None) == 2.0


@settings(max_examples=50)
@given(st.integers(3, 12), st.integers())
def test_every_blow_is_planned_with_as_many_kills_as_wanted(kills: int, seed: int) -> None:
    blows = plan_blows(kills, seed)
    assert set(blows) >= set(Blow) - {Blow.KILLED}
    assert len(blows) == kills
    assert plan_blows(0, seed) == []


def test_one_bit_of_a_checkpoint_is_flipped(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    before = {tmp_path / "a": b"first", tmp_path / "inside" / "b": b"second"}
    for path, content in before.items():
        path.write_bytes(content)
    damaged = flip_a_byte(tmp_path, random.Random(0))
    changed = {path: (content, path.read_bytes()) for path, content in before.items() if path.read_bytes() != content}
    assert set(changed) == {damaged}
    old, new = (int.from_bytes(content) for content in changed[damaged])
    assert (old ^ new).bit_count() == 1


def write_run(folder: Path, ends: list[tuple[int, str, str]], notes: list[dict[str, Any]], sequences: int) -> None:
    def write(name: str, content: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in content))

    (folder / "run").mkdir()
    write("run/ledger.jsonl", [{"epoch": epoch, "prompt_id": prompt, "end": end} for epoch, prompt, end in ends])
    write("run/events.jsonl", [{"event": "rollout_retried"}])
    write("run/metrics.jsonl", [{"train/sequences": sequences}])
    write("notes.jsonl", notes)


def test_counts_come_from_the_ledger_and_the_notes(tmp_path: Path) -> None:
    visits = [[0, "a"], [0, "b"], [1, "a"], [1, "b"]]
    ends = [(0, "a", "trained"), (0, "a", "trained"), (0, "b", "dropped"), (1, "b", "trained")]
    notes = [
        {"note": "begin", "process": 0, "t": 10.0, "visits": visits},
        {"note": "fault", "process": 0, "t": 11.0, "kind": "engine_slow"},
        {"note": "fault", "process": 0, "t": 11.0, "kind": "engine_hangs"},
        {"note": "exit", "process": 0, "t": 12.0, "code": 1, "struck": False},
        {"note": "exit", "process": 1, "t": 13.0, "code": -9, "struck": True},
        {"note": "begin", "process": 2, "t": 20.0, "visits": visits},
        {"note": "end", "process": 2, "t": 23.0, "rows": 5, "groups": 2, "reason": "data_exhausted"},
        {"note": "exit", "process": 2, "t": 30.0, "code": 0, "struck": False},
    ]
    write_run(tmp_path, ends, notes, sequences=10)
    load = Load(prompts=2, epochs=2, kills=1, rate=0.1, seed=0)
    outcome = Outcome.of(tmp_path, load)
    assert (outcome.lost, outcome.twice, outcome.dropped, outcome.rows_left) == (1, 1, 1, 5)
    assert (outcome.kills, outcome.survived, outcome.fatal) == (1, 1, Counter({"engine_hangs": 1}))
    assert (outcome.samples_s, outcome.samples_s_with_restarts) == (10 / 5, 10 / 13)
    wrong = outcome.untrue(load)
    assert {"dropped = 1", "lost = 1", "twice = 1", "rows_left = 5", "groups_left = 2"} <= set(wrong)
    assert f"10 samples were trained, not {4 * GROUP_SIZE}" in wrong
    assert "trainer_finish was never injected" in wrong


@pytest.mark.long
@pytest.mark.timeout(900)
def test_faults_and_kills_leave_no_trace_in_the_losses_of_a_deterministic_run(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=64)
    load = Load(prompts=160, epochs=1, kills=1, rate=0.05, seed=5)  # 20 steps: three blows, and some left after them
    settings = {
        "deterministic": True,
        "staleness": {"policy": "in_order", "lookahead": 0},
        "weight_sync": {"mode": "drain"},
        "algorithm": {},
    }
    calm = ChaosRun(tmp_path / "calm", model, load.undisturbed, **settings)
    chaos = ChaosRun(tmp_path / "chaos", model, load, **settings)
    assert calm.execute().untrue(load.undisturbed) == []
    assert chaos.execute().untrue(load) == []
    trained = [
        [(line["train/loss"], line["train/grad_norm"]) for line in lines(run.run_dir / "metrics.jsonl")]
        for run in (calm, chaos)
    ]
    assert trained[0] == trained[1]
    assert len(set(trained[0])) > 4


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_survives_every_kind_of_fault_and_three_kills() -> None:
    command = [sys.executable, "benchmarks/chaos.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [result[key] for key in ("lost", "twice", "rows_left", "dropped")] == [0, 0, 0, 0], result
    assert result["kills"] >= 3
    assert set(result["by_kind"]) == {kind.value for kind in Kind}
    assert min(result["by_kind"].values()) >= 1, result
    assert result["survived"] == result["faults"] == sum(result["by_kind"].values())
    assert result["throughput_ratio"] > 0
