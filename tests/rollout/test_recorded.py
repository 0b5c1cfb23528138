"""Recorded groups on disk: found again under any prompt id, whole or not at all, and errors that name the folder."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data_plane import archive
from penstock.data_plane.archive import load_rows
from penstock.data_plane.client import SampleBatch
from penstock.errors import RecordError, SetupError
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.recorded import FOLDER, RecordedGroup, Recording, RecordingFolder, RecordingInfo

INFO = RecordingInfo(settings={"rollout.group_size": 2}, tokenizer="digits")


def group(prompt_id: str = "p", *, epoch: int = 0, position: int = 0) -> RecordedGroup:
    return RecordedGroup(
        epoch=epoch,
        prompt_id=prompt_id,
        prompt="what?",
        position=position,
        start_version=0,
        end_version=1,
        largest_token=7,
        sequence_lengths=[3, 4],
        tags=[{"environment": "e", "first_version": 0, "last_version": 1}] * 2,
    )


def rows(reward: float = 1.0) -> SampleBatch:
    return SampleBatch(("g_g0", "g_g1"), {"reward": torch.full((2,), reward)})


def opened(run_dir: Path) -> RecordingFolder:
    return RecordingFolder(run_dir / FOLDER, INFO)


def reward_of(run_dir: Path, prompt_id: str = "p", epoch: int = 0) -> float:
    found = Recording.read(run_dir).find(epoch, prompt_id)
    assert found is not None
    return float(load_rows(found[1]).tensor("reward")[0])


prompt_ids = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.sampled_from(
        ["", ".", "..", "a/b", "a\\b", "../../etc", "A", "a", "CON", "x" * 5000, "naïve", "問題", "a b", "a_b", "-"]
    ),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), prompt_ids), min_size=1, max_size=6, unique=True))
def test_any_prompt_id_is_found_again_under_its_own_epoch(keys: list[tuple[int, str]]) -> None:
    with TemporaryDirectory() as name:
        folder = opened(Path(name))
        for position, (epoch, prompt_id) in enumerate(keys):
            folder.write(group(prompt_id, epoch=epoch, position=position), rows(float(position)))
        inside = [path for path in (Path(name) / FOLDER).iterdir() if path.is_dir()]
        assert len(inside) == len(keys) == len({path.name.lower() for path in inside})
        assert all(len(path.name.encode()) < 100 for path in inside)
        assert [found.key for found in Recording.read(name).groups] == keys
        assert [reward_of(Path(name), prompt_id, epoch) for epoch, prompt_id in keys] == list(range(len(keys)))


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), -1.5])
def test_a_recording_is_found_again_whatever_stands_for_a_missing_value(tmp_path: Path, missing: float) -> None:
    def info(number: float) -> RecordingInfo:
        column = ExtraColumn("score", "fixed", "float32", optional=True, missing=number)
        return RecordingInfo(settings={}, tokenizer="digits", columns=(column,))

    RecordingFolder(tmp_path / FOLDER, info(missing)).write(group(), rows())
    assert Recording.read(tmp_path).info == info(missing)
    RecordingFolder(tmp_path / FOLDER, info(missing)).write(group("other"), rows())
    with pytest.raises(SetupError, match=r"different settings \(the environment's extra_columns\)"):
        RecordingFolder(tmp_path / FOLDER, info(2.0))


def test_a_recording_whose_column_is_damaged_is_named(tmp_path: Path) -> None:
    columns = (ExtraColumn("score", "fixed", "float32"),)
    RecordingFolder(tmp_path / FOLDER, INFO.model_copy(update={"columns": columns})).write(group(), rows())
    path = tmp_path / FOLDER / "recording.json"
    path.write_text(path.read_text().replace("float32", "float33"))
    with pytest.raises(SetupError, match=r"recording\.json' cannot be used: .*'score' has the dtype 'float33'"):
        Recording.read(tmp_path)


def test_groups_come_in_the_order_of_dispatch(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for position in (2, 0, 1):
        folder.write(group(f"p{position}", position=position), rows())
    assert [found.prompt_id for found in Recording.read(tmp_path).groups] == ["p0", "p1", "p2"]


def test_a_group_recorded_again_replaces_the_older_record(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.write(group(), rows(1.0))
    folder.write(group(), rows(2.0))
    assert reward_of(tmp_path) == 2.0
    assert len(list((tmp_path / FOLDER).iterdir())) == 2


def test_a_kill_between_the_two_records_leaves_the_older_one(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.write(group(), rows(1.0))
    final = tmp_path / FOLDER / group().folder_name
    final.rename(final.with_name(f".replaced-{final.name}"))
    assert reward_of(tmp_path) == 1.0
    opened(tmp_path).write(group(), rows(2.0))
    assert reward_of(tmp_path) == 2.0
    assert not list((tmp_path / FOLDER).glob(".replaced-*"))


def test_a_group_that_was_half_written_is_not_there(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.write(group(), rows())
    draft = tmp_path / FOLDER / ".draft-0-other"
    draft.mkdir()
    assert len(Recording.read(tmp_path).groups) == 1
    opened(tmp_path)
    assert not draft.exists()


def test_a_full_disk_names_the_folder_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    folder.write(group(), rows(1.0))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "save_rows", full)
    with pytest.raises(RecordError, match="No space left on device") as caught:
        folder.write(group(), rows(2.0))
    assert group().folder_name in str(caught.value)
    assert reward_of(tmp_path) == 1.0
    assert not list((tmp_path / FOLDER).glob(".draft-*"))


def test_a_recording_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    opened(tmp_path)
    opened(tmp_path)
    other = INFO.model_copy(update={"settings": {"rollout.group_size": 3}})
    with pytest.raises(SetupError, match=r"different settings \(rollout.group_size\)"):
        RecordingFolder(tmp_path / FOLDER, other)
    with pytest.raises(SetupError, match="the tokenizer"):
        RecordingFolder(tmp_path / FOLDER, INFO.model_copy(update={"tokenizer": "letters"}))


class TestFoldersThatAreNoRecording:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(SetupError, match=r"rollout.replay_from: there is no folder .*missing"):
            Recording.read(tmp_path / "missing")

    def test_a_run_that_recorded_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(SetupError, match=r"holds no recorded rollouts; record some with .*--rollouts-only"):
            Recording.read(tmp_path)

    def test_no_complete_group(self, tmp_path: Path) -> None:
        opened(tmp_path)
        with pytest.raises(SetupError, match="no complete group"):
            Recording.read(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2, "settings": {}, "tokenizer": ""}'])
    def test_damaged_description_of_the_recording(self, tmp_path: Path, content: str) -> None:
        opened(tmp_path)
        (tmp_path / FOLDER / "recording.json").write_text(content)
        with pytest.raises(SetupError, match=r"recording.json' cannot be used"):
            Recording.read(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps(group().model_dump() | {"epoch": -1})])
    def test_damaged_group(self, tmp_path: Path, content: str) -> None:
        opened(tmp_path).write(group(), rows())
        place = tmp_path / FOLDER / group().folder_name
        (place / "group.json").write_text(content)
        with pytest.raises(SetupError, match="Remove the folder to continue without it") as caught:
            Recording.read(tmp_path)
        assert str(place) in str(caught.value)
        shutil.rmtree(place)
        opened(tmp_path).write(group("other"), rows())
        assert len(Recording.read(tmp_path).groups) == 1


@pytest.mark.parametrize("written_before", [True, False])
def test_nothing_is_written_to_a_folder_that_another_run_took_the_place_of(
    tmp_path: Path, written_before: bool
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    folder = RecordingFolder(run_dir / FOLDER, INFO, opened=False)
    assert list(run_dir.iterdir()) == []
    if written_before:
        folder.write(group(), rows())
    run_dir.rename(tmp_path / "moved")
    (run_dir / FOLDER).mkdir(parents=True)
    with pytest.raises(RecordError, match="was replaced during the run"):
        folder.write(group("other"), rows())
    assert list((run_dir / FOLDER).iterdir()) == []


def test_other_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / FOLDER / ".draft-0-other").mkdir()
    with pytest.raises(SetupError, match="recorded with different settings"):
        RecordingFolder(tmp_path / FOLDER, INFO.model_copy(update={"tokenizer": "words"}), opened=False)
    assert (tmp_path / FOLDER / ".draft-0-other").exists()
