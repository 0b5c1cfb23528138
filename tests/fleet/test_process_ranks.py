"""Real engine processes in a fleet: requests cross with their tokens when ranks come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.model import ModelConfig
from penstock.rollout.engines.base import FinishReason, GenerationRequest, GenerationResult
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.rollout.fleet import EngineFleet, RankState
from tests.engines.helpers import request
from tests.support.processes import wait_until_gone
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.long
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "threads": 1}
LONG = 900
"""Tokens of a response that is certainly not over when something happens to its rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


class Ranks:
    """Makes engines in processes; all are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self._model = ModelConfig(path=str(folder), dtype="float64")
        self.pids: list[int] = []

    def __call__(self, name: str) -> ProcessEngine:
        engine = ProcessEngine(EngineProcess(self._model, "cpu", name=name, **OPTIONS), None)
        self.pids.append(engine.pid)
        return engine


@pytest.fixture
def ranks(folder: Path) -> Iterator[Ranks]:
    made = Ranks(folder)
    yield made
    for pid in made.pids:
        wait_until_gone(pid)


def asked(count: int, group: str = "g", **sampling: Any) -> list[GenerationRequest]:
    return [
        replace(request(f"{group}{i}", (3, 4, 5 + i), LONG, i, **sampling), group_id=f"{group}{i // 2}")
        for i in range(count)
    ]


async def running(fleet: EngineFleet, *names: str) -> None:
    """Wait until each of these ranks has drawn some tokens."""
    while not all(fleet.rank_stats()[name].tokens_generated > 20 for name in names):  # noqa: ASYNC110 - looked at
        await asyncio.sleep(0.01)


def check(results: list[GenerationResult], wanted: list[GenerationResult]) -> None:
    assert [each.token_ids for each in results] == [each.token_ids for each in wanted]
    for one, other in zip(results, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.finish_reason is FinishReason.LENGTH
        assert [ids.tolist() for ids in one.kept_ids] == [ids.tolist() for ids in other.kept_ids]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 7}], ids=["whole", "truncated"])
async def test_ranks_come_and_go_and_die_while_requests_run(ranks: Ranks, sampling: dict[str, Any]) -> None:
    alone = ranks("alone")
    requests = asked(8, **sampling)
    wanted = list(await asyncio.gather(*map(alone.generate, requests)))
    await alone.close()
    first, second, third = await asyncio.gather(*(asyncio.to_thread(ranks, f"embedded-{i}") for i in range(3)))
    fleet = EngineFleet([first, second])
    calls = [asyncio.create_task(fleet.generate(each)) for each in requests]
    await running(fleet, "embedded-0", "embedded-1")
    fleet.add_rank(third, current=True)
    await fleet.remove_rank("embedded-0")
    await running(fleet, "embedded-2")
    os.kill(second.pid, signal.SIGKILL)
    results = list(await asyncio.gather(*calls))
    check(results, wanted)
    assert {rank.name: rank.state for rank in fleet.ranks} == {
        "embedded-1": RankState.DEAD,
        "embedded-2": RankState.SERVING,
    }
    await fleet.close()


async def test_requests_wait_for_a_rank_and_go_on_in_it_with_their_tokens(ranks: Ranks) -> None:
    alone = ranks("alone")
    requests = asked(3)
    wanted = list(await asyncio.gather(*map(alone.generate, requests)))
    fleet = EngineFleet([alone])
    calls = [
        asyncio.create_task(fleet.generate(replace(each, request_id=f"again-{each.request_id}"))) for each in requests
    ]
    before = alone.stats().tokens_generated
    while alone.stats().tokens_generated < before + 60:  # noqa: ASYNC110 - the engine is looked at
        await asyncio.sleep(0.005)
    await fleet.remove_rank("alone")
    assert fleet.waits_for_engines
    fleet.add_rank(await asyncio.to_thread(ranks, "next"), current=True)
    check(list(await asyncio.gather(*calls)), wanted)
    assert fleet.rank_stats()["next"].tokens_generated < 3 * LONG, "what they had was not generated again"
    await fleet.close()
