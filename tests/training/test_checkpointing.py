from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.errors import CheckpointError, SetupError, StepStateError
from penstock.training.backends.local import LocalBackend
from penstock.training.backends.local.checkpointing import LocalSnapshot
from tests.support.tiny_models import tiny_model
from tests.training.support import bit_equal, comparable, data_plane, put_groups, trainer, weights

SETTINGS = {"optimizer": {"lr": 1e-3, "warmup_steps": 5, "weight_decay": 0.01}}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
async def test_a_restored_run_goes_on_bit_for_bit(family: str, tied: bool, tmp_path: Path) -> None:
    plane = data_plane()
    metas = [put_groups(plane, 2, seed=step, name=f"s{step}p") for step in range(4)]
    model = tiny_model(family, tied=tied)
    local = trainer(model, plane, **SETTINGS)
    for step in range(2):
        await local.train(step, metas[step])
    torch.manual_seed(123)
    (await local.snapshot()).write(tmp_path)
    drawn = torch.rand(3)

    other = tiny_model(family, tied=tied, seed=99)
    restored = trainer(other, plane, **SETTINGS)
    await restored.train(7, metas[3])
    torch.manual_seed(5)
    await restored.load_checkpoint(tmp_path)
    assert restored.version == 2
    assert torch.equal(torch.rand(3), drawn)
    assert bit_equal(weights(model), weights(other))
    for step in range(2, 4):
        one, two = await local.train(step, metas[step]), await restored.train(step, metas[step])
        assert one.version == two.version == step + 1
        assert comparable(one.metrics, same_partition=True) == comparable(two.metrics, same_partition=True)
        assert bit_equal(weights(model), weights(other))
    await local.close()
    await restored.close()


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_the_folder_is_a_model_for_transformers_and_holds_no_pickle(tmp_path: Path) -> None:
    model, plane = tiny_model(), data_plane()
    local = trainer(model, plane)
    await local.train(0, put_groups(plane, 1))
    (await local.snapshot()).write(tmp_path)
    await local.close()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bit_equal(weights(model), weights(loaded))
    files = files_of(tmp_path)
    assert {file.suffix for file in files} <= {".json", ".safetensors"}
    beside_config = {file.name for file in files if file.parent == tmp_path and file.suffix == ".safetensors"}
    assert beside_config == {"model.safetensors"}


async def test_an_open_step_is_neither_saved_nor_overwritten(tmp_path: Path) -> None:
    plane = data_plane()
    local = trainer(tiny_model(), plane)
    (await local.snapshot()).write(tmp_path)
    await local.begin_train_step(0)
    with pytest.raises(StepStateError, match="snapshot: step 0 is open"):
        (await local.snapshot()).write(tmp_path)
    with pytest.raises(StepStateError, match="load_checkpoint: step 0 is open"):
        await local.load_checkpoint(tmp_path)
    await local.abort_train_step(0)
    (await local.snapshot()).write(tmp_path)
    await local.close()


async def damaged(folder: Path, what: str) -> None:
    local = trainer(tiny_model(), plane := data_plane())
    await local.train(0, put_groups(plane, 1))
    (await local.snapshot()).write(folder)
    await local.close()
    state = folder / "trainer_state.json"
    if what == "no state":
        state.unlink()
    elif what == "no optimizer":
        (folder / "trainer" / "optimizer.safetensors").unlink()
    elif what == "torn state":
        state.write_text(state.read_text()[:20])
    elif what == "other format":
        state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    elif what == "torn weights":
        weights_file = folder / "model.safetensors"
        weights_file.write_bytes(weights_file.read_bytes()[:100])
    elif what == "a weight missing":
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(next(name for name in tensors if "down_proj" in name))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


DAMAGES = {
    "no state": "checkpoint",
    "no optimizer": "checkpoint",
    "torn state": "checkpoint",
    "other format": "checkpoint",
    "torn weights": "the weights cannot be read",
    "a weight missing": "down_proj.* is missing from the file",
}


@pytest.mark.parametrize("what", DAMAGES)
async def test_a_damaged_checkpoint_is_refused_before_anything_changes(what: str, tmp_path: Path) -> None:
    await damaged(tmp_path, what)
    model = tiny_model(seed=1)
    local, before = trainer(model, data_plane()), weights(model)
    with pytest.raises(SetupError, match=DAMAGES[what]):
        await local.load_checkpoint(tmp_path)
    assert bit_equal(before, weights(model))
    await local.close()


async def test_a_snapshot_knows_by_how_much_the_moments_will_make_it_grow(tmp_path: Path) -> None:
    local = trainer(tiny_model(), plane := data_plane())
    fresh = await local.snapshot()
    (tmp_path / "fresh").mkdir()
    fresh.write(tmp_path / "fresh")
    await local.train(0, put_groups(plane, 1))
    (tmp_path / "trained").mkdir()
    trained = await local.snapshot()
    trained.write(tmp_path / "trained")
    await local.close()
    before, after = (sum(file.stat().st_size for file in files_of(tmp_path / name)) for name in ("fresh", "trained"))
    assert fresh.bytes_to_come > 0
    assert trained.bytes_to_come == 0
    assert after - before == pytest.approx(fresh.bytes_to_come, rel=0.1)


async def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    await damaged(tmp_path, "nothing")
    model = tiny_model(hidden=16)
    local, before = trainer(model, data_plane()), weights(model)
    with pytest.raises(SetupError, match="does not belong to this model"):
        await local.load_checkpoint(tmp_path)
    assert bit_equal(before, weights(model))
    await local.close()


async def test_a_snapshot_is_the_trainers_own_written_once_and_its_memory_is_free_then(tmp_path: Path) -> None:
    local = trainer(tiny_model(), data_plane())
    with watched_copies() as copies:
        snapshot = await local.snapshot()
        replaced = snapshot
        snapshot = await local.snapshot()
        assert [copy() is None for copy in copies] == [True, False]
        with pytest.raises(CheckpointError, match="a later one has taken its place"):
            replaced.write(tmp_path)
        snapshot.write(tmp_path)
        assert [copy() is None for copy in copies] == [True, True]
        with pytest.raises(CheckpointError, match="it was written before"):
            snapshot.write(tmp_path)
    await local.load_checkpoint(tmp_path)
    await local.close()


@contextmanager
def watched_copies() -> Iterator[list[weakref.ref[LocalSnapshot]]]:
    """The copies that backends make inside, without keeping them alive."""
    made: list[weakref.ref[LocalSnapshot]] = []
    real = LocalBackend.save

    def save(self: LocalBackend, version: int) -> LocalSnapshot:
        copy = real(self, version)
        made.append(weakref.ref(copy))
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalBackend, "save", save)
        yield made
