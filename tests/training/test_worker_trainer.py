"""A trainer that lives elsewhere computes, fails, saves and publishes as one in this process."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.config.sections.model import ModelConfig
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.field_spec import FLOATING, per_token
from penstock.data_plane.fields import TRAIN_FIELDS, schema
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import CheckpointError, MissingRowError, SetupError, StepStateError, TrainerLost, WeightSyncError
from penstock.runtime.workers import Placement, WorkerKind, WorkerSpec, start
from penstock.training.interface import StepResult, Trainer
from penstock.training.workers.front import WorkerTrainer
from penstock.training.workers.local import LocalTrainer
from penstock.weights.digest import published_digests
from penstock.weights.publication import SharedMemoryEndpoint, WeightSite
from penstock.weights.site import site_of
from penstock.weights.transports.opening import open_weights
from tests.support.processes import wait_until_gone
from tests.support.tiny_models import save_tiny_model
from tests.training.support import LOGPROBS, PARTITION, algorithm, comparable, put_groups, training

START_SECONDS = 300.0
KINDS = [WorkerKind.THREAD, pytest.param(WorkerKind.PROCESS, marks=pytest.mark.long)]
OPTIONS = {"temperature": 1.0, "threads": 1, "lanes": 2, "longest_row": 96}
Start = Callable[..., WorkerTrainer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def plane() -> Iterator[ShmOwner]:
    owner = ShmOwner(10_000_000)
    owner.register_partition(PARTITION, [*schema(*TRAIN_FIELDS), per_token(LOGPROBS, FLOATING)])
    yield owner
    owner.close()


def spec(folder: Path, plane: ShmOwner) -> WorkerSpec:
    settings = {
        "model": ModelConfig(path=str(folder)),
        "device": "cpu",
        "seed": 0,
        "data_plane": plane.address(),
        "algorithm": algorithm(),
        "training": training(),
        "trainer": OPTIONS,
    }
    return WorkerSpec("penstock.training.workers.served:serve_local", settings)


@pytest.fixture
async def begin(folder: Path, plane: ShmOwner) -> AsyncIterator[Start]:
    """Starts trainers, and ends what the test leaves of them."""
    begun: list[WorkerTrainer] = []

    def make(kind: WorkerKind, seconds: float = START_SECONDS) -> WorkerTrainer:
        begun.append(WorkerTrainer(start(spec(folder, plane), Placement(kind, "trainer", 1)), seconds))
        return begun[-1]

    yield make
    for trainer in begun:
        await trainer.close()


def here(folder: Path, plane: ShmOwner) -> LocalTrainer:
    return LocalTrainer.from_pretrained(
        str(folder), plane, algorithm=algorithm(), training=training(), device="cpu", **OPTIONS
    )


async def train(trainer: Trainer, step: int, metas: Any) -> StepResult:
    await trainer.begin_train_step(step)
    for meta in metas:
        await trainer.train_microbatch(step, meta)
    return await trainer.finish_train_step(step)


async def digests(trainer: Trainer) -> dict[str, str]:
    publication = await trainer.publish_weights([site_of()])
    found = await asyncio.to_thread(published_digests, publication)
    await trainer.release_weights(publication)
    return found


def logprobs(plane: ShmOwner, meta: KVBatchMeta) -> torch.Tensor:
    column = plane.get_samples(meta, [LOGPROBS])[LOGPROBS]
    assert isinstance(column, JaggedColumn)
    return column.values.clone()


def groups(plane: ShmOwner, step: int) -> Any:
    return put_groups(plane, 3, seed=step, name=f"s{step}p", vocabulary=20)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
async def test_it_computes_the_same_to_the_bit(kind: WorkerKind, begin: Start, folder: Path, plane: ShmOwner) -> None:
    there, local = begin(kind), here(folder, plane)
    for step in range(2):
        metas = groups(plane, step)
        one, other = await train(there, step, metas), await train(local, step, metas)
        assert one.version == other.version == step + 1
        assert one.metrics["grad_norm"] > 0
        assert comparable(one.metrics, same_partition=True) == comparable(other.metrics, same_partition=True)
        await there.compute_logprobs(metas[0], LOGPROBS)
        written = logprobs(plane, metas[0])
        await local.compute_logprobs(metas[0], LOGPROBS)
        assert torch.equal(written, logprobs(plane, metas[0]))
    assert await digests(there) == await digests(local)
    await local.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_keep_their_types_and_the_open_step(kind: WorkerKind, begin: Start, plane: ShmOwner) -> None:
    trainer = begin(kind)
    with pytest.raises(StepStateError, match="finish_train_step"):
        await trainer.finish_train_step(0)
    metas = groups(plane, 0)
    await trainer.begin_train_step(0)
    await trainer.train_microbatch(0, metas[0])
    plane.clear_samples(list(metas[1].sample_ids), PARTITION)
    with pytest.raises(MissingRowError, match="s0p1"):
        await trainer.train_microbatch(0, metas[1])
    await trainer.abort_train_step(0)
    assert (await train(trainer, 0, [metas[0]])).version == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_snapshot_that_hangs_holds_up_no_step_and_is_of_its_moment(
    kind: WorkerKind, begin: Start, plane: ShmOwner, tmp_path: Path
) -> None:
    """A pipe that nobody reads takes the place of a disk that hangs."""
    trainer = begin(kind)
    await train(trainer, 0, groups(plane, 0))
    before = await digests(trainer)
    snapshot = await trainer.snapshot()
    slow = tmp_path / "slow"
    slow.mkdir()
    os.mkfifo(slow / "generation_config.json")
    os.mkfifo(slow / "config.json")
    writing = asyncio.create_task(asyncio.to_thread(snapshot.write, slow))
    assert (await train(trainer, 1, groups(plane, 1))).version == 2
    assert await digests(trainer) != before
    assert not writing.done()
    with pytest.raises(CheckpointError, match="written before"):
        await asyncio.to_thread(snapshot.write, tmp_path)
    for name in ("config.json", "generation_config.json"):
        await asyncio.to_thread((slow / name).read_bytes)
    await writing


@pytest.mark.parametrize("kind", KINDS)
async def test_what_it_saves_is_a_model_and_continues_bit_for_bit(
    kind: WorkerKind, begin: Start, plane: ShmOwner, tmp_path: Path
) -> None:
    first = begin(kind)
    await train(first, 0, groups(plane, 0))
    saved = tmp_path / "saved"
    saved.mkdir()
    await asyncio.to_thread((await first.snapshot()).write, saved)
    AutoModelForCausalLM.from_pretrained(saved)
    metas = groups(plane, 1)
    expected = await train(first, 1, metas)
    second = begin(WorkerKind.THREAD)
    await second.load_checkpoint(saved)
    found = await train(second, 1, metas)
    assert found.version == 2
    assert comparable(found.metrics, same_partition=True) == comparable(expected.metrics, same_partition=True)
    assert await digests(first) == await digests(second)


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_are_readable_until_they_are_released(kind: WorkerKind, begin: Start) -> None:
    trainer = begin(kind)
    elsewhere = WeightSite(site_of().machine, 1)
    publication = await trainer.publish_weights([elsewhere])
    [endpoint] = publication.endpoints
    assert isinstance(endpoint, SharedMemoryEndpoint)
    open_weights(publication, elsewhere).close()
    await trainer.release_weights(publication, still_read=True)
    open_weights(publication, elsewhere).close()
    await trainer.release_weights(publication)
    with pytest.raises(WeightSyncError, match="no longer there"):
        open_weights(publication, elsewhere)


@pytest.mark.long
async def test_once_its_process_is_gone_every_call_says_how_and_what_to_do(begin: Start, plane: ShmOwner) -> None:
    trainer = begin(WorkerKind.PROCESS)
    metas = groups(plane, 0)
    snapshot = await trainer.snapshot()
    told = asyncio.create_task(trainer.lost())
    os.kill(trainer.pid, 9)
    said = r"^trainer: its process \d+ was ended by SIGKILL\. .*runtime\.trainer_process.*went with it\. .*memory"
    with pytest.raises(TrainerLost, match=said):
        await trainer.begin_train_step(1)
    with pytest.raises(TrainerLost, match=said):
        await trainer.publish_weights()
    with pytest.raises(TrainerLost, match=said):
        await asyncio.to_thread(snapshot.write, Path())
    assert re.match(said, str(await told)), "also whoever asks nothing of it"
    await trainer.close()
    assert plane.count_samples(PARTITION) == sum(len(meta) for meta in metas)


@pytest.mark.long
async def test_one_that_is_not_ready_in_time_is_killed(begin: Start) -> None:
    with pytest.raises(SetupError, match=r"its process (\d+) is not ready after 0\.01 s; .*start_seconds") as caught:
        begin(WorkerKind.PROCESS, seconds=0.01)
    wait_until_gone(int(str(caught.value).split("process ")[1].split()[0]))


@pytest.mark.long
def test_one_that_is_killed_while_it_loads_says_what_to_look_for(plane: ShmOwner, folder: Path) -> None:
    worker = start(spec(folder, plane), Placement(WorkerKind.PROCESS, "trainer", 1))
    os.kill(worker.pid, 9)
    with pytest.raises(
        SetupError, match=r"SIGKILL, before it was ready\. If nobody killed it.*memory; penstock verify"
    ):
        WorkerTrainer(worker, START_SECONDS)


@pytest.mark.long
def test_one_that_cannot_be_built_says_why_as_in_a_thread(plane: ShmOwner, tmp_path: Path) -> None:
    broken = save_tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")

    def failed(kind: WorkerKind) -> tuple[type, str]:
        with pytest.raises(SetupError) as caught:
            WorkerTrainer(start(spec(broken, plane), Placement(kind, "trainer", 1)), START_SECONDS)
        return type(caught.value), str(caught.value)

    assert failed(WorkerKind.PROCESS) == failed(WorkerKind.THREAD)
