"""An environment's own columns on every adapter: as rows, through a checkpoint's archive, and through a recording."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.data_plane import fields
from penstock.data_plane.archive import load_rows, save_rows
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_keeper import RowKeeper
from penstock.errors import DataPlaneError
from penstock.rollout.engines.base import GenerationRequest, SamplingParams
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments.base import GenerationHandle, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn, row_schema
from penstock.rollout.manager import PARTITION, PushedGroup, RolloutManager, RolloutSettings
from penstock.rollout.prompts import Prompt, PromptVisit
from penstock.rollout.recorded import FOLDER, Recording, RecordingFolder, RecordingInfo
from penstock.rollout.recording_writer import RecordingWriter
from penstock.rollout.replay import RecordedEnvironment, ReplayFailure, ReplaySource
from tests.data_plane.support import cells_of
from tests.support.scripted_run import NumberTokenizer, ScriptedEnvironment

COLUMNS = (
    ExtraColumn("features", "fixed", "bfloat16", shape=(2, 3)),
    ExtraColumn("place", "per_token", "int32"),
    ExtraColumn("vector", "per_token", "float32", shape=(2,)),
    ExtraColumn("hints", "fixed", "int64", metric="sum"),
    ExtraColumn("score", "fixed", "float64", metric="max", optional=True, missing=-1.0),
    ExtraColumn("notes", "object"),
)
NAMES = tuple(column.name for column in COLUMNS)
INFO = RecordingInfo(settings={}, tokenizer="digits", columns=COLUMNS)


class Observing(ScriptedEnvironment):
    """Its columns say which sample a row is; every second prompt has no score."""

    extra_columns = COLUMNS

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        played = await super().run(prompt, handle)
        number, length = int(prompt.text), played.row_length
        columns: dict[str, Any] = {
            "features": torch.full((2, 3), number + 0.5, dtype=torch.bfloat16),
            "place": list(range(length)),
            "vector": torch.arange(2.0 * length).reshape(length, 2) + number,
            "hints": number,
            "notes": None if number == 3 else {"número": [number, None, "\u2028"]},
        }
        return replace(played, columns=columns | ({"score": number / 4} if number % 2 == 0 else {}))


def visit(number: int) -> PromptVisit:
    return PromptVisit(0, Prompt(str(number), str(number)), position=number)


def answer(request: GenerationRequest) -> ScriptedResponse:
    return ScriptedResponse(0.0, token_ids=tuple(range(11, 12 + request.prompt_ids[0])))


def manager(plane: DataPlaneClient, run_dir: Path | None = None) -> RolloutManager:
    plane.register_partition(PARTITION, row_schema(COLUMNS))
    settings = RolloutSettings(2, SamplingParams(max_new_tokens=8), seed=0, generation_timeout_seconds=60)
    writer = None if run_dir is None else RecordingWriter(RecordingFolder(run_dir / FOLDER, INFO))
    return RolloutManager(ScriptedEngine(answer), Observing(9), NumberTokenizer(), plane, settings, writer)


async def groups(plane: DataPlaneClient, *numbers: int) -> list[PushedGroup]:
    made = manager(plane)
    return [await made.generate_and_push(visit(number), f"group{number}", 0) for number in numbers]


def same_rows(one: SampleBatch, other: SampleBatch, names: tuple[str, ...]) -> bool:
    return all(cells_of(one, name) == cells_of(other, name) for name in names)


async def test_rows_of_several_groups_hold_what_the_environment_gave(plane: DataPlaneClient) -> None:
    pushed = await groups(plane, 2, 3, 4)
    meta = KVBatchMeta.concat([group.meta for group in pushed])
    try:
        batch = plane.get_samples(meta.subset([5, 0, 2]), ("score", "place", "notes", "features", "vector", "hints"))
        assert batch.tensor("hints").tolist() == [4, 2, 3]
        assert batch.tensor("score").tolist() == [1.0, 0.5, -1.0], "a row without a score holds what stands for it"
        assert batch.tensor("features").dtype == torch.bfloat16
        assert batch.tensor("features")[:, 1, 2].tolist() == [4.5, 2.5, 3.5]
        assert [batch.jagged("place").row(row).tolist() for row in range(3)] == [
            list(range(6)),
            list(range(4)),
            list(range(5)),
        ]
        assert batch.jagged("vector").row(1).tolist() == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
        assert batch.objects("notes").items[2] is None
        assert batch.objects("notes").items[0] == {"número": [4, None, "\u2028"]}
        assert set(NAMES) <= meta.fields, "also where a column has no value in some rows"
        assert [tags["metrics"] for tags in meta.tags[1:3]] == [{"hints": 2.0, "score": 0.5}, {"hints": 3.0}]
    finally:
        plane.clear_samples(meta.sample_ids, PARTITION)


async def test_a_checkpoints_rows_come_back_with_them(plane: DataPlaneClient, tmp_path: Path) -> None:
    pushed = await groups(plane, 5, 6)
    meta = KVBatchMeta.concat([group.meta for group in pushed])
    names = (*fields.ROLLOUT_FIELDS, *NAMES)
    before = plane.get_samples(meta, names)
    expected = {name: cells_of(before, name) for name in names}
    del before
    keeper = RowKeeper(plane)
    held = await keeper.hold(meta, sorted(meta.fields))
    plane.clear_samples(meta.sample_ids, PARTITION)
    held.save(tmp_path)
    held.release()
    try:
        assert set(NAMES) <= (await keeper.load(tmp_path, PARTITION)).fields
        after = plane.get_samples(meta, names)
        assert {name: cells_of(after, name) for name in names} == expected
    finally:
        plane.clear_samples(meta.sample_ids, PARTITION)


async def test_a_replay_has_them_to_the_bit(plane: DataPlaneClient, tmp_path: Path) -> None:
    recorded = await manager(plane, tmp_path).generate_and_push(visit(4), "first", 0)
    recording = Recording.read(tmp_path)
    assert RecordedEnvironment(recording).extra_columns == COLUMNS
    again = await ReplaySource(recording, plane).generate_and_push(visit(4), "second", 0)
    try:
        assert again.meta.fields == recorded.meta.fields
        assert again.meta.tags == recorded.meta.tags
        names = (*fields.ROLLOUT_FIELDS, *NAMES)
        assert same_rows(plane.get_samples(recorded.meta, names), plane.get_samples(again.meta, names), names)
    finally:
        plane.clear_samples((*recorded.meta.sample_ids, *again.meta.sample_ids), PARTITION)


def without(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: column for name, column in columns.items() if name != "hints"}


def shorter(columns: dict[str, Any]) -> dict[str, Any]:
    place = columns["place"]
    return columns | {"place": JaggedColumn.from_rows([place.row(row)[1:] for row in range(len(place))])}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (without, "its rows have the wrong columns: hints"),
        (shorter, "place is not as long as its rows"),
        (lambda columns: columns | {"hints": columns["hints"].int()}, "hints is fixed int32, not fixed int64"),
        (lambda columns: columns | {"features": columns["features"][:, :1]}, r"features has the shape \[1, 3\]"),
    ],
    ids=["missing", "length", "dtype", "shape"],
)
async def test_a_recording_whose_columns_are_not_as_declared_is_damaged(
    plane: DataPlaneClient, tmp_path: Path, damage: Any, why: str
) -> None:
    recorded = await manager(plane, tmp_path).generate_and_push(visit(1), "first", 0)
    plane.clear_samples(recorded.meta.sample_ids, PARTITION)
    recording = Recording.read(tmp_path)
    found = recording.find(0, "1")
    assert found is not None
    rows = load_rows(found[1])
    save_rows(found[1], SampleBatch(rows.sample_ids, damage(dict(rows.columns))))
    with pytest.raises(ReplayFailure, match=why):
        await ReplaySource(recording, plane).generate_and_push(visit(1), "second", 0)
    assert plane.count_samples(PARTITION) == 0


def test_a_partition_refuses_a_column_that_is_not_declared(plane: DataPlaneClient) -> None:
    plane.register_partition(PARTITION, row_schema(COLUMNS))
    with pytest.raises(DataPlaneError, match=r"fields \['other'\] are not part of partition"):
        plane.put_samples(["a_g0"], {"other": torch.zeros(1)}, PARTITION)
