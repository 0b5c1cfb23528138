"""What the controller records: every group from dispatch to its one end, pumps, trainer, engine and counters."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import EngineError, MissingRowError
from penstock.observe.samples import SampleLog
from penstock.observe.timeline import Timeline
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.rollout.prompts import Prompt
from penstock.training.workers.scripted import ScriptedTrainer
from tests.controller.test_policies import SAMPLERS, jitter
from tests.support.scripted_run import ScriptedRun, scripted_config
from tests.support.trace_checks import check_trace, ends_of, lives, names_of

Events = list[dict[str, Any]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


async def traced(run: ScriptedRun, path: Path, stop_after: float | None = None) -> Events:
    """Run to the end, or stop after some seconds; the valid trace it left."""
    run.timeline = Timeline.to_file(path)
    running = asyncio.create_task(run.run())
    if stop_after is not None:
        await asyncio.sleep(stop_after)
        run.controller.stop("interrupted")
    try:
        await running
    finally:
        run.timeline.close()
        events = recorded(path)
        check_trace(events)
        assert lives(events), "a run without groups proves nothing about groups"
    return events


def recorded(path: Path) -> Events:
    found: Events = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
async def test_every_dispatched_group_has_one_end(sampler: dict[str, Any], path: Path) -> None:
    config = scripted_config(staleness=sampler, algorithm={"correction": {"kind": "tis"}})
    run = ScriptedRun(config, prompts=24, script=jitter)
    events = await traced(run, path)
    ends = Counter(ends_of(events))
    assert ends["trained"] == 24
    assert ends["evicted"] == len(run.names("group_evicted"))
    assert ends.total() == ends["trained"] + ends["evicted"]


async def test_a_trained_group_carries_what_is_known_of_it(path: Path) -> None:
    run = ScriptedRun(scripted_config(), prompts=8, reward=lambda prompt: float(prompt.text))
    events = await traced(run, path)
    life = next(life for life in lives(events).values() if life[0]["args"]["prompt_id"] == "5")
    assert life[0]["args"]["start_version"] == 1
    assert life[-1]["args"] | {"tokens": 0} == {
        "end": "trained",
        "end_version": 1,
        "tokens": 0,
        "step": 2,
        "lag": 0,
        "reward_mean": 5.0,
    }


async def test_pumps_trainer_engine_and_counters_are_there(path: Path) -> None:
    trainer = ScriptedTrainer(chunk_seconds=lambda meta: 0.01, finish_seconds=0.005)
    slow = ScriptedRun(scripted_config(), prompts=8, trainer=trainer, script=lambda request: ScriptedResponse(0.02))
    events = await traced(slow, path)
    tracks = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"rollout pump", "advantage pump", "train pump", "weight sync", "trainer", "scripted"} <= tracks
    assert {
        "step 1",
        "step 2",
        "waiting for groups",
        "waiting for the trainer to finish the step",
        "train_microbatch",
        "finish_train_step",
        "copying weights to the engines",
        "paused for new weights",
        "busy",
    } <= names_of(events)
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"buffer", "weight version", "scripted requests", "scripted slots at work"}
    versions = [e["args"]["trainer"] for e in events if e["name"] == "weight version"]
    assert versions[-1] == 2
    assert versions == sorted(versions)
    last = [e for e in events if e["name"] == "buffer"][-1]
    assert last["args"] == {"generating": 0, "ready": 0}


async def test_the_trainers_spans_are_as_long_as_its_work(path: Path) -> None:
    trainer = ScriptedTrainer(chunk_seconds=lambda meta: 0.02)
    events = await traced(run := ScriptedRun(scripted_config(), prompts=8, trainer=trainer), path)
    spans = [e for e in events if e["name"] == "train_microbatch"]
    assert len(spans) == len(run.trainer.trained)
    for span, chunk in zip(spans, run.trainer.trained, strict=True):
        assert span["dur"] / 1e6 == pytest.approx(chunk.ended - chunk.began, abs=0.015)


async def test_a_retried_and_a_dropped_prompt_end_as_such_with_their_cause(path: Path) -> None:
    def script(request: GenerationRequest) -> ScriptedResponse:
        if request.prompt_ids == (3,):
            raise EngineError("no such luck")
        return ScriptedResponse(0.0)

    failure = {"infra_attempts": 2, "max_dropped_prompts": 1, "on_drop": "replace"}
    run = ScriptedRun(scripted_config(rollout={"failure": failure}), prompts=9, script=script)
    events = await traced(run, path)
    ends = Counter(ends_of(events))
    assert ends == {"trained": 8, "retried": 1, "dropped": 1}
    failed = [life[-1]["args"] for life in lives(events).values() if life[-1]["args"]["end"] != "trained"]
    assert all("no such luck" in args["cause"] for args in failed)
    assert {"rollout_retried", "prompt_dropped"} <= {name for name, _ in run.events}


async def test_filtered_groups_end_as_filtered(path: Path) -> None:
    def reward(prompt: Prompt) -> float:
        rewards[prompt.prompt_id] += 1
        return 1.0 if prompt.prompt_id == "2" else float(rewards[prompt.prompt_id] % 2)

    rewards: Counter[str] = Counter()
    config = scripted_config(algorithm={"dynamic_sampling": {"enabled": True}})
    events = await traced(ScriptedRun(config, prompts=9, reward=reward), path)
    assert Counter(ends_of(events)) == {"trained": 8, "filtered": 1}


async def test_a_run_that_is_stopped_ends_every_group_and_span(path: Path) -> None:
    run = ScriptedRun(scripted_config(), prompts=400, script=lambda request: ScriptedResponse(0.01))
    events = await traced(run, path, stop_after=0.15)
    ends = Counter(ends_of(events))
    assert ends["trained"] > 0
    assert ends.keys() <= {"trained", "abandoned", "run ended"}


async def test_a_step_that_fails_for_good_abandons_its_groups(path: Path) -> None:
    def explode(step_id: int, meta: object) -> None:
        raise RuntimeError("no")

    run = ScriptedRun(scripted_config(), prompts=8, trainer=ScriptedTrainer(before_chunk=explode))
    with pytest.raises(RuntimeError, match="no"):
        await traced(run, path)
    assert "abandoned" in ends_of(recorded(path))


async def test_a_call_of_the_trainer_that_raises_is_on_the_timeline(path: Path) -> None:
    def fails_once(step_id: int, meta: object) -> None:
        if not failed:
            failed.append(step_id)
            raise RuntimeError("no")

    failed: list[int] = []
    config = scripted_config(training={"train_attempts": 2})
    run = ScriptedRun(config, prompts=8, trainer=ScriptedTrainer(before_chunk=fails_once))
    events = await traced(run, path)
    errors = [e["args"] for e in events if e["name"] == "train_microbatch" and "error" in e["args"]]
    assert (errors[0]["error"], errors[0]["step"]) == ("RuntimeError", 1)


class TestOneNumbering:
    """A step has the same number wherever a person meets it: that of its line in `metrics.jsonl`."""

    async def test_spans_groups_and_calls_of_a_step(self, path: Path) -> None:
        run = ScriptedRun(scripted_config(), prompts=8)
        events = await traced(run, path)
        assert [metrics["step"] for metrics in run.steps] == [1.0, 2.0]
        for name in ("train_microbatch", "finish_train_step", "training"):
            assert {e["args"]["step"] for e in events if e["name"] == name and e["ph"] in "Xb"} == {1, 2}

    async def test_the_step_that_a_group_is_meant_for(self, path: Path) -> None:
        config = scripted_config(staleness={"policy": "in_order"}, algorithm={"correction": {"kind": "tis"}})
        events = await traced(ScriptedRun(config, prompts=8), path)
        for life in lives(events).values():
            assert life[0]["args"]["target_step"] == life[-1]["args"]["step"]

    async def test_events_about_a_step(self, path: Path) -> None:
        def explode(step_id: int, meta: object) -> None:
            if step_id == 1 and not failed:
                failed.append(step_id)
                raise RuntimeError("no")

        failed: list[int] = []
        config = scripted_config(training={"train_attempts": 2}, data={"partial_step": "drop"})
        run = ScriptedRun(config, prompts=10, trainer=ScriptedTrainer(before_chunk=explode))
        await run.run()
        assert {event["step"] for event in run.names("train_microbatch_failed")} == {2}
        assert [event["step"] for event in run.names("step_replayed")] == [2]
        assert [event["step"] for event in run.names("partial_step_dropped")] == [3]


def kept_in(path: Path) -> Events:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestKeptSamples:
    async def test_some_responses_of_each_step_are_kept_with_their_facts(self, tmp_path: Path) -> None:
        run = ScriptedRun(scripted_config(), prompts=8, reward=lambda prompt: float(prompt.text))
        run.samples = SampleLog(tmp_path / "samples.jsonl", per_step=3)
        await run.run()
        kept = kept_in(tmp_path / "samples.jsonl")
        assert Counter(record["step"] for record in kept) == {1: 3, 2: 3}
        for record in kept:
            assert record["prompt"] == record["prompt_id"] == str(int(record["reward"]))
            assert record["response"] == "1"
            assert (record["lag"], record["length"], record["truncated"]) == (0, 1, False)
            assert record["environment"] == "scripted"

    async def test_rows_that_cannot_be_read_are_an_event_and_nothing_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = ScriptedRun(scripted_config(), prompts=8)
        run.samples = SampleLog(tmp_path / "samples.jsonl", per_step=1)
        read = run.data_plane.get_samples

        def no_text(meta: Any, names: Any) -> Any:
            if "response_text" in names:
                raise MissingRowError("the row is gone")
            return read(meta, names)

        monkeypatch.setattr(run.data_plane, "get_samples", no_text)
        assert await run.run() == "data_exhausted"
        assert [event["step"] for event in run.names("samples_not_kept")] == [1, 2]
        assert len(run.trained_groups) == 8

    async def test_texts_that_do_not_come_in_time_are_an_event_and_the_diagnosis_names_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.controller.bookkeeping.kept_samples._READ_SECONDS", 0.05)
        run = ScriptedRun(scripted_config(), prompts=8)
        run.samples = SampleLog(tmp_path / "samples.jsonl", per_step=1)
        waited_for: list[str] = []

        async def never(*_: Any) -> Any:
            waited_for.append(run.controller.diagnosis()["train_pump"])
            await asyncio.Event().wait()

        monkeypatch.setattr("penstock.rollout.sample_texts.WorkerTexts.read", never)
        async with asyncio.timeout(60):
            assert await run.run() == "data_exhausted"
        assert [event["step"] for event in run.names("samples_not_kept")] == [1, 2]
        assert "their texts were not read within 0.05 s" in run.names("samples_not_kept")[0]["cause"]
        assert waited_for == ["waiting for sample texts"] * 2
        assert len(run.trained_groups) == 8

    async def test_a_full_disk_does_not_end_the_run_and_the_event_names_the_file(self) -> None:
        run = ScriptedRun(scripted_config(), prompts=8)
        run.samples = SampleLog("/dev/full", per_step=1)
        assert await run.run() == "data_exhausted"
        causes = [event["cause"] for event in run.names("samples_not_kept")]
        assert len(causes) == 2
        assert all("RecordError: '/dev/full' cannot be written: No space left on device" in cause for cause in causes)
