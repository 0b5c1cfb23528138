"""Text of any kind, surrogates included, through everything that writes text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.reading.loading import dump_config, parse_config
from penstock.controller.bookkeeping.snapshot import ControllerSnapshot, ControllerState, SavedController
from penstock.controller.failures.classify import classify, describe
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import ObjectColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_keeper import RowKeeper
from penstock.errors import ConfigError, FailureKind
from penstock.observe.events import EventLog
from penstock.observe.report.build import write_report
from penstock.rollout.environments.base import Trajectory
from penstock.rollout.prompts import Prompt, PromptStream, derive_seed
from penstock.rollout.recorded import FOLDER, RecordedGroup, Recording, RecordingFolder, RecordingInfo
from penstock.text import cut, error_text, is_safe, named_error, safe, safe_value
from tests.config.settings import settings as run_settings
from tests.support.misbehaving.names import Unspeakable
from tests.support.run_files import write_lines, write_run

texts = st.one_of(
    st.text(st.characters(), max_size=20),
    st.text(st.sampled_from("\ud800\udbff\udc00\udfff\0\x1b\x85\u2028\ufeff\uffff a"), max_size=8),
)
values = st.recursive(
    st.one_of(texts, st.none(), st.booleans(), st.integers(), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(texts)
def test_safe_text_can_be_encoded_and_nothing_else_is_changed(text: str) -> None:
    made = safe(text)
    assert made.encode().decode() == made
    assert len(made) == len(text)
    assert all(old == new or "\ud800" <= old <= "\udfff" for old, new in zip(text, made, strict=True))
    assert safe(made) == made


@given(values)
def test_safe_values_can_be_written_as_json_and_come_back_the_same(value: Any) -> None:
    made = safe_value(value)
    assert is_safe(made)
    json.dumps(made, ensure_ascii=False).encode()
    assert (made is value) == is_safe(value)


def test_values_that_are_safe_stay_the_objects_that_they_are() -> None:
    round_about: list[Any] = ["a"]
    round_about.append(round_about)
    deep: Any = "a"
    for _ in range(100_000):
        deep = [deep]
    for value in (round_about, deep, {"a": object()}, b"\xff", ("a", 1)):
        assert safe_value(value) is value


@given(st.lists(st.tuples(texts, texts, values, st.dictionaries(texts, values, max_size=2)), min_size=1, max_size=4))
def test_any_prompts_can_be_digested_and_seeded_and_say_whether_they_were_changed(
    records: list[tuple[str, str, Any, dict[str, Any]]],
) -> None:
    prompts = [Prompt(*record, messages=({"role": "user", "content": record[1]},)) for record in records]
    assert len(PromptStream(prompts, epochs=1, shuffle=True, seed=0).digest) == 32
    for prompt, record in zip(prompts, records, strict=True):
        derive_seed(0, prompt.prompt_id)
        said = (prompt.prompt_id, prompt.text, prompt.answer, dict(prompt.facts), prompt.messages)
        assert is_safe(said)
        assert prompt.repaired == (not is_safe(record))


@settings(max_examples=50, deadline=None)
@given(texts, texts)
def test_a_snapshot_with_any_text_is_read_as_it_was_written(environment: str, response: str) -> None:
    name, said = safe(environment), Trajectory((), 0.0, response).response_text
    state = ControllerState(
        stream="x",
        redispatches={},
        ready={"g": 0},
        groups=1,
        committed=1,
        dropped=0,
        bound_drops=[],
        free_drops=0,
        events={f"rollout_retried/{name}": 1},
        tokens_generated=0,
        elapsed_seconds=0.0,
        buffer={"tags": [{"environment": name}]},
    )
    rows = SampleBatch(("g_g0",), {fields.REWARD: torch.zeros(1), fields.RESPONSE_TEXT: ObjectColumn((said,))})
    plane = MemoryDataPlane()
    plane.register_partition("p", fields.ROW_SCHEMA)
    plane.put_samples(rows.sample_ids, rows.columns, "p")
    meta = KVBatchMeta("p", rows.sample_ids, frozenset(rows.columns), (0,))
    keeper = RowKeeper(plane)
    with TemporaryDirectory() as folder:
        held = asyncio.run(keeper.hold(meta, sorted(meta.fields)))
        ControllerSnapshot(state, b"\1", held).write(Path(folder))
        found = SavedController.read(Path(folder))
        plane.clear_samples(rows.sample_ids, "p")
        assert found.rows is not None
        asyncio.run(keeper.load(found.rows, "p"))
    assert found.state == state
    assert plane.get_samples(meta, [fields.RESPONSE_TEXT])[fields.RESPONSE_TEXT] == ObjectColumn((said,))


@settings(max_examples=30, deadline=None)
@given(texts, texts)
def test_a_recorded_group_of_any_prompt_is_found_again(prompt_id: str, text: str) -> None:
    prompt = Prompt(prompt_id, text)
    info = RecordingInfo(settings={}, tokenizer="x")
    group = RecordedGroup(
        epoch=0,
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        position=0,
        start_version=0,
        end_version=0,
        largest_token=1,
        sequence_lengths=[1],
        tags=[{}],
    )
    with TemporaryDirectory() as folder:
        RecordingFolder(Path(folder) / FOLDER, info).write(group, SampleBatch(("g",), {"reward": torch.zeros(1)}))
        assert Recording.read(folder).find(0, prompt.prompt_id) is not None


@settings(max_examples=50, deadline=None)
@given(texts, values)
def test_events_with_any_text_are_lines_of_json_and_listeners_hear_what_is_written(text: str, value: Any) -> None:
    heard: list[Any] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with EventLog(path) as log:
            log.subscribe(lambda name, event: heard.append(event["cause"]))
            log.emit("rollout_retried", cause=text, error=text, value=value)
            counts = log.counts
        (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["cause"] == safe(text) == heard[0]
    assert f"rollout_retried/{safe(text)}" in counts


@settings(max_examples=10, deadline=None)
@given(texts)
def test_a_report_about_any_text_that_files_hold_can_be_written(text: str) -> None:
    with TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", 2)
        write_lines(
            run / "events.jsonl", [{"event": "prompt_dropped", "prompt_id": text, "reason": text, "time": text}]
        )
        write_lines(run / "samples.jsonl", [{"step": 1, "prompt": text, "response": text, "environment": text}])
        (run / "summary.json").write_text(json.dumps({"stopped_by": text, "error": text}), encoding="utf-8")
        assert write_report(run).path.read_text(encoding="utf-8")


@given(st.lists(texts, min_size=1, max_size=5))
def test_any_chain_of_errors_is_described_in_text_that_can_be_written(said: list[str]) -> None:
    error = ValueError("")
    for text in said:
        cause, error = error, ValueError(text)
        error.__cause__ = cause
    assert is_safe(describe(error))
    assert describe(error).startswith(f"ValueError: {safe(said[-1])}" if said[-1] else "ValueError")


def test_a_long_error_is_cut_and_says_how_much_is_missing() -> None:
    assert describe(ValueError("x" * 5_000_000)) == f"ValueError: {'x' * 2000} … (4,998,000 more characters)"
    chain: BaseException = ValueError("x" * 3000)
    for _ in range(2_000):
        outer = ValueError("x" * 3000)
        outer.__cause__, chain = chain, outer
    assert len(describe(chain)) < 8_100
    assert describe(chain).endswith("more characters)")
    assert classify(chain) is FailureKind.DATA
    assert cut("abc", 3) == "abc"


def test_an_error_that_cannot_speak_is_described_all_the_same() -> None:
    assert error_text(Unspeakable()) == "(its text is not available: ValueError)"
    assert (
        describe(Unspeakable()) == named_error(Unspeakable()) == "Unspeakable: (its text is not available: ValueError)"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rollout__environment__args": {"a": ["\ud800"]}},
            r"rollout\.environment\.args\.a\[0\]: has half of a surrogate",
        ),
        ({"rollout__environment__args": {"\ud800": 1}}, "rollout.environment.args.\ufffd: has half of a surrogate"),
        ({"data__prompt_key": "\udfff"}, r"data\.prompt_key: has half of a surrogate"),
        ({"run_dir": "\udcff"}, r"run_dir: has half of a surrogate"),
    ],
)
def test_settings_that_are_no_text_are_refused_with_their_key(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(run_settings(**changes))


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=10))
def test_any_other_text_in_settings_is_written_and_read_as_it_is(text: str) -> None:
    from penstock.config.reading.yaml_dialect import parse_yaml

    config = parse_config(run_settings(rollout__environment__args={"text": text}))
    assert parse_yaml(dump_config(config))["rollout"]["environment"]["args"] == {"text": text}
