"""Groups that are written before they count, and come back as they were."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.controller.failures.classify import classify
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.archive import load_rows
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import JaggedColumn
from penstock.errors import ConfigError, DataPlaneError, FailureKind, RecordError, SetupError
from penstock.rollout.engines.base import GenerationRequest, SamplingParams
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments.base import Split
from penstock.rollout.manager import PARTITION, GroupSource, PushedGroup, RolloutManager, RolloutSettings
from penstock.rollout.prompts import Prompt, PromptVisit
from penstock.rollout.recorded import FOLDER, RecordedGroup, Recording, RecordingFolder, RecordingInfo
from penstock.rollout.recording_writer import RecordingWriter
from penstock.rollout.replay import (
    RecordedEnvironment,
    RecordedStream,
    ReplayFailure,
    ReplaySource,
    check_model,
    check_settings,
)
from tests.support.scripted_run import NumberTokenizer, ScriptedEnvironment

INFO = RecordingInfo(settings={"rollout.group_size": 3, "rollout.sampling.temperature": 1.0}, tokenizer="digits")


def visit(number: int, *, epoch: int = 0) -> PromptVisit:
    return PromptVisit(epoch, Prompt(str(number), str(number)), position=epoch * 10 + number)


def new_plane() -> MemoryDataPlane:
    plane = MemoryDataPlane()
    plane.register_partition(PARTITION, fields.ROW_SCHEMA)
    return plane


def answer(request: GenerationRequest) -> ScriptedResponse:
    return ScriptedResponse(0.0, token_ids=tuple(range(11, 12 + request.prompt_ids[0])))


def recording_source(plane: MemoryDataPlane, run_dir: Path) -> RolloutManager:
    settings = RolloutSettings(3, SamplingParams(max_new_tokens=8), seed=0, generation_timeout_seconds=5)
    environment = ScriptedEnvironment(9, lambda prompt: int(prompt.text) / 7)
    writer = RecordingWriter(RecordingFolder(run_dir / FOLDER, INFO))
    return RolloutManager(ScriptedEngine(answer), environment, NumberTokenizer(), plane, settings, writer)


async def record(run_dir: Path, *visits: PromptVisit) -> list[PushedGroup]:
    source = recording_source(new_plane(), run_dir)
    return [await source.generate_and_push(each, f"group{place}", 0) for place, each in enumerate(visits)]


async def test_a_group_is_on_disk_before_it_counts(tmp_path: Path) -> None:
    (pushed,) = await record(tmp_path, visit(3))
    (group,) = Recording.read(tmp_path).groups
    assert (group.prompt_id, group.position, group.prompt) == ("3", 3, "3")
    assert tuple(group.sequence_lengths) == pushed.meta.sequence_lengths
    assert group.largest_token == 14
    assert group.tags == [dict(tags) for tags in pushed.meta.tags]


async def test_a_replayed_group_is_the_recorded_one_under_another_id(tmp_path: Path) -> None:
    plane = new_plane()
    pushed = await recording_source(plane, tmp_path).generate_and_push(visit(4), "first", 0)
    again = await ReplaySource(Recording.read(tmp_path), plane).generate_and_push(visit(4), "second", 0)
    assert again.meta.sample_ids == ("second_g0", "second_g1", "second_g2")
    assert again.end_version == pushed.end_version == 0
    assert again.meta.sequence_lengths == pushed.meta.sequence_lengths
    assert again.meta.tags == pushed.meta.tags
    assert again.meta.fields == pushed.meta.fields
    before, after = (plane.get_samples(group.meta, fields.ROLLOUT_FIELDS) for group in (pushed, again))
    for name in fields.ROLLOUT_FIELDS:
        left, right = before[name], after[name]
        if isinstance(left, JaggedColumn):
            assert isinstance(right, JaggedColumn)
            assert torch.equal(left.offsets_R1, right.offsets_R1)
            left, right = left.values, right.values
        same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        assert same, name
        assert not isinstance(left, torch.Tensor) or left.dtype == right.dtype


@pytest.mark.parametrize(("trainer", "kept"), [(0, [-1, 0, 0, 0]), (2, [-1, 0, 2, 2]), (5, [-1, 0, 2, 3])])
async def test_no_token_is_newer_than_the_weights_it_is_replayed_to(
    tmp_path: Path, trainer: int, kept: list[int]
) -> None:
    folder = RecordingFolder(tmp_path / FOLDER, INFO)
    plane = new_plane()
    pushed = await recording_source(plane, tmp_path).generate_and_push(visit(2), "g", 0)
    batch = plane.get_samples(pushed.meta, fields.ROLLOUT_FIELDS)
    versions = JaggedColumn.from_rows([torch.tensor([-1, 0, 2, 3], dtype=torch.int32)] * 3)
    changed = type(batch)(batch.sample_ids, {**batch.columns, fields.TOKEN_VERSIONS: versions})
    (group,) = Recording.read(tmp_path).groups
    tags = [{**tags, "last_version": 3} for tags in group.tags]
    folder.write(group.model_copy(update={"tags": tags, "end_version": 3}), changed)
    again = await ReplaySource(Recording.read(tmp_path), plane).generate_and_push(visit(2), "again", trainer)
    rows = plane.get_samples(again.meta, [fields.TOKEN_VERSIONS]).jagged(fields.TOKEN_VERSIONS)
    assert rows.row(1).tolist() == kept
    assert rows.values.dtype == torch.int32
    assert [tags["last_version"] - tags["first_version"] for tags in again.meta.tags] == [max(kept)] * 3
    assert again.end_version == trainer


def forget_kept_tokens(run_dir: Path) -> None:
    """Make the recording one of a version that did not write down what tokens were drawn from."""
    ((group, folder),) = ((each, run_dir / FOLDER / each.folder_name) for each in Recording.read(run_dir).groups)
    rows = load_rows(folder)
    columns = {name: column for name, column in rows.columns.items() if name not in fields.KEPT_FIELDS}
    RecordingFolder(run_dir / FOLDER, Recording.read(run_dir).info).write(group, SampleBatch(rows.sample_ids, columns))


async def test_an_older_recording_from_the_whole_vocabulary_is_replayed(tmp_path: Path) -> None:
    await record(tmp_path, visit(3))
    forget_kept_tokens(tmp_path)
    plane = new_plane()
    again = await ReplaySource(Recording.read(tmp_path), plane).generate_and_push(visit(3), "again", 0)
    batch = plane.get_samples(again.meta, fields.KEPT_FIELDS)
    assert not batch.jagged(fields.KEPT_COUNTS).values.any()
    assert batch.jagged(fields.KEPT_IDS).lengths_R.tolist() == [0, 0, 0]


async def test_an_older_recording_of_truncated_sampling_is_refused(tmp_path: Path) -> None:
    await record(tmp_path, visit(3))
    forget_kept_tokens(tmp_path)
    path = tmp_path / FOLDER / "recording.json"
    info = RecordingInfo.model_validate_json(path.read_bytes())
    path.write_text(info.model_copy(update={"settings": {"rollout.sampling.top_p": 0.9}}).model_dump_json())
    with pytest.raises(ReplayFailure, match="do not record which tokens truncated sampling kept"):
        await ReplaySource(Recording.read(tmp_path), new_plane()).generate_and_push(visit(3), "again", 0)


class TestWritesThatFail:
    async def test_a_full_disk_leaves_no_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise RecordError("no space left")

        monkeypatch.setattr(RecordingFolder, "write", full)
        plane = new_plane()
        with pytest.raises(RecordError):
            await recording_source(plane, tmp_path).generate_and_push(visit(1), "g", 0)
        assert plane.count_samples(PARTITION) == 0

    async def test_a_cancelled_group_ends_its_write_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def slow(*_: Any) -> None:
            begun.set()
            assert go_on.wait(60)
            ended.set()

        monkeypatch.setattr(RecordingFolder, "write", slow)
        plane = new_plane()
        task = asyncio.create_task(recording_source(plane, tmp_path).generate_and_push(visit(1), "g", 0))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        assert plane.count_samples(PARTITION) == 0

    async def test_few_groups_are_written_at_a_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lock, go_on, at_work, most = threading.Lock(), threading.Event(), 0, 0

        def counted(*_: Any) -> None:
            nonlocal at_work, most
            with lock:
                at_work += 1
                most = max(most, at_work)
                if at_work == 2:
                    go_on.set()
            assert go_on.wait(60)
            with lock:
                at_work -= 1

        monkeypatch.setattr(RecordingFolder, "write", counted)
        source = recording_source(new_plane(), tmp_path)
        await asyncio.gather(*(source.generate_and_push(visit(n), f"g{n}", 0) for n in range(8)))
        assert most == 2


class TestGroupsThatCannotBeReplayed:
    async def failure(self, source: GroupSource, asked: PromptVisit, plane: MemoryDataPlane) -> str:
        with pytest.raises(ReplayFailure) as caught:
            await source.generate_and_push(asked, "g", 0)
        assert classify(caught.value) is FailureKind.DATA
        assert plane.count_samples(PARTITION) == 0
        return str(caught.value)

    async def test_a_prompt_that_was_not_recorded_is_named(self, tmp_path: Path) -> None:
        await record(tmp_path, visit(1))
        plane = new_plane()
        said = await self.failure(ReplaySource(Recording.read(tmp_path), plane), visit(1, epoch=1), plane)
        assert said == f"prompt 1:1 of the recording in {str(tmp_path)!r} does not exist"

    async def test_damaged_rows_are_a_data_failure_that_names_the_folder(self, tmp_path: Path) -> None:
        await record(tmp_path, visit(1))
        recording, plane = Recording.read(tmp_path), new_plane()
        rows = tmp_path / FOLDER / recording.groups[0].folder_name / "rows.safetensors"
        rows.write_bytes(rows.read_bytes()[:-9])
        said = await self.failure(ReplaySource(recording, plane), visit(1), plane)
        assert str(rows.parent) in said

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sequence_lengths": [9, 9, 9]}, "do not have the recorded lengths"),
            ({"largest_token": 500}, "token ids differ from the recorded ones"),
        ],
    )
    async def test_rows_of_another_group_are_noticed(
        self, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        await record(tmp_path, visit(1))
        recording, plane = Recording.read(tmp_path), new_plane()
        group, folder = recording.find(0, "1") or (None, None)
        assert group is not None
        assert folder is not None
        (folder / "group.json").write_text(group.model_copy(update=change).model_dump_json())
        said = await self.failure(ReplaySource(Recording.read(tmp_path), plane), visit(1), plane)
        assert message in said

    async def test_a_put_that_fails_leaves_no_rows(self, tmp_path: Path) -> None:
        class Torn(MemoryDataPlane):
            async def put_samples_async(
                self, sample_ids: Any, columns: Any, partition_id: str, tags: Any = None
            ) -> None:
                self.put_samples(sample_ids, columns, partition_id, tags)
                raise DataPlaneError("torn")

        await record(tmp_path, visit(1))
        plane = Torn()
        plane.register_partition(PARTITION, fields.schema(*fields.ROLLOUT_FIELDS))
        with pytest.raises(DataPlaneError, match="torn"):
            await ReplaySource(Recording.read(tmp_path), plane).generate_and_push(visit(1), "g", 0)
        assert plane.count_samples(PARTITION) == 0


async def test_the_stream_is_the_recording_in_order_of_dispatch_with_its_epochs(tmp_path: Path) -> None:
    await record(tmp_path, visit(2, epoch=1), visit(2), visit(0), visit(0, epoch=1))
    recording = Recording.read(tmp_path)
    stream = RecordedStream(recording.groups)
    assert [each.key for each in stream] == ["0:0", "0:2", "1:0", "1:2"]
    assert [each.position for each in stream] == [0, 1, 2, 3] == list(range(len(stream)))
    assert [each.key for each in stream.from_position(2)] == ["1:0", "1:2"]
    assert stream.digest == RecordedStream(Recording.read(tmp_path).groups).digest
    assert stream.digest != RecordedStream(recording.groups[1:]).digest
    environment = RecordedEnvironment(recording)
    assert [prompt.prompt_id for prompt in environment.prompts(Split.TRAIN)] == ["0", "2", "0", "2"]
    assert environment.prompts(Split.EVAL) == []


def test_settings_that_a_recording_does_not_share_are_each_named() -> None:
    check_settings(INFO, dict(INFO.settings), "runs/x")
    with pytest.raises(ConfigError) as caught:
        check_settings(INFO, {"rollout.group_size": 4, "rollout.sampling.temperature": 0.5}, "runs/x")
    assert caught.value.problems == [
        "rollout.group_size: is 4, but the rollouts in 'runs/x' were recorded with 3; use the same",
        "rollout.sampling.temperature: is 0.5, but the rollouts in 'runs/x' were recorded with 1.0; use the same",
    ]


class TestModelsThatDoNotFit:
    @pytest.fixture
    async def recording(self, tmp_path: Path) -> Recording:
        await record(tmp_path, visit(1), visit(5))
        return Recording.read(tmp_path)

    async def test_a_model_that_fits_is_taken(self, recording: Recording) -> None:
        check_model(recording, "digits", vocabulary=17, group_size=3)

    async def test_a_smaller_vocabulary(self, recording: Recording) -> None:
        with pytest.raises(ConfigError, match=r"model.path: .* token ids up to 16, but this model's vocabulary has 16"):
            check_model(recording, "digits", vocabulary=16, group_size=3)

    async def test_another_tokenizer(self, recording: Recording) -> None:
        with pytest.raises(ConfigError, match=r"model.path: .* another tokenizer"):
            check_model(recording, "letters", vocabulary=17, group_size=3)

    async def test_a_group_that_is_not_whole(self, recording: Recording) -> None:
        whole = recording.groups[0]
        torn = RecordedGroup(**whole.model_dump() | {"sequence_lengths": [3, 3]})
        broken = Recording(recording.run_dir, recording.info, (torn,), {})
        with pytest.raises(SetupError, match=r"prompt 1 of epoch 0 .* has 2 samples, but rollout.group_size is 3"):
            check_model(broken, "digits", vocabulary=17, group_size=3)
