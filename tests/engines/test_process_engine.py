"""An engine in a process of its own does what one in this process does, and its process ends with whoever needs it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.model import ModelConfig
from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.errors import EngineError, PromptTooLong, RequestAborted, SetupError, WeightSyncError
from penstock.rollout.engines.base import EngineHealth, FinishReason
from penstock.rollout.engines.embedded import InvalidRequest
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.rollout.handle import HFTokenizer
from penstock.weights.digest import tensor_digests
from penstock.weights.hf import load_model
from penstock.weights.synchronizer import WeightSynchronizer
from tests.engines.helpers import end_publications, generate_all, mixed_requests, published, request, running_engine
from tests.support.processes import alive, stop, wait_until_gone
from tests.support.tiny_models import char_tokenizer, save_tiny_model, tiny_model

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "threads": 1}
GIVEN = 3
"""The version of the weights that the shared engine begins with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def started(folder: Path, timeouts: TimeoutsConfig | None = None) -> ProcessEngine:
    config = ModelConfig(path=str(folder))
    return ProcessEngine(EngineProcess(config, "cpu", **OPTIONS), timeouts)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Any:
    """A model of the folder's shape, with weights of its own."""
    return tiny_model(vocabulary=load_model(ModelConfig(path=str(folder))).config.vocab_size, seed=9)


@pytest.fixture(scope="module")
def shared(folder: Path, policy: Any) -> Iterator[ProcessEngine]:
    """One engine for the tests that leave it as it was."""
    process = EngineProcess(ModelConfig(path=str(folder)), "cpu", **OPTIONS, awaits_weights=True)
    engine = ProcessEngine(process)
    asyncio.run(WeightSynchronizer([engine]).publish(published(policy, GIVEN, engine)))
    end_publications()
    yield engine
    asyncio.run(engine.close())


async def test_it_serves_the_weights_it_is_given_not_those_of_the_folder(shared: ProcessEngine, policy: Any) -> None:
    assert shared.stats().version == GIVEN
    assert await shared.weight_digests() == tensor_digests(policy.named_parameters())


async def test_its_responses_end_at_stop_strings(shared: ProcessEngine) -> None:
    """It has a tokenizer of its own, from the model's folder."""
    tokens = HFTokenizer(char_tokenizer())
    asked = request("free", new=20, seed=5)
    free = await shared.generate(asked)
    text = tokens.decode(free.token_ids, frozenset())
    stop = text[8:11]
    stopped = await shared.generate(request("stopped", new=20, seed=5, stop=(stop, "never there")))
    length = text.index(stop) + len(stop)
    assert stopped.token_ids == free.token_ids[:length]
    assert (stopped.stop_string, stopped.finish_reason) == (stop, FinishReason.STOP)


async def test_it_generates_what_an_engine_in_this_process_does(shared: ProcessEngine, policy: Any) -> None:
    asked = mixed_requests(9, temperature=0.8)
    async with running_engine(policy, **OPTIONS, version=GIVEN) as embedded:
        expected = await generate_all(embedded, asked)
    found = list(await asyncio.gather(*map(shared.generate, asked)))
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.token_versions == other.token_versions
        assert one.finish_reason is other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_requests_that_cannot_be_served_are_refused_as_what_they_are(shared: ProcessEngine) -> None:
    with pytest.raises(PromptTooLong, match=r"rollout\.engine\.max_model_len"):
        await shared.generate(request(prompt=[3] * 64))
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await shared.generate(request(prompt=[2**40]))
    assert len((await shared.generate(request())).token_ids) == 8


async def test_a_paused_engine_holds_requests_until_it_is_resumed(shared: ProcessEngine) -> None:
    await shared.pause()
    assert shared.health() is EngineHealth.PAUSED
    task = asyncio.ensure_future(shared.generate(request("held")))
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done
    await shared.resume()
    assert len((await task).token_ids) == 8
    assert shared.health() is EngineHealth.HEALTHY


async def test_aborted_and_cancelled_requests_leave_the_engine(shared: ProcessEngine) -> None:
    await shared.pause()
    aborted, cancelled = (asyncio.ensure_future(shared.generate(request(name, new=50))) for name in ("a", "c"))
    await asyncio.sleep(0)
    await shared.abort(["a", "unknown"])
    with pytest.raises(RequestAborted):
        await aborted
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    before = shared.stats().tokens_generated
    await shared.resume()
    assert len((await shared.generate(request("c", new=3))).token_ids) == 3, "its id is free again"
    assert shared.stats().tokens_generated == before + 3
    assert shared.stats().running == shared.stats().waiting == 0


async def test_new_weights_are_served_under_their_version(shared: ProcessEngine, policy: Any) -> None:
    other = tiny_model(vocabulary=policy.config.vocab_size, seed=5)
    with pytest.raises(EngineError, match="paused engine"):
        await shared.update_weights(published(other, 7, shared))
    task = asyncio.ensure_future(shared.generate(request("old and new", new=58)))
    for model, version in ((other, 7), (policy, GIVEN)):
        await shared.pause()
        await shared.update_weights(published(model, version, shared))
        await shared.resume()
        assert await shared.weight_digests() == tensor_digests(model.named_parameters())
        assert shared.stats().version == version
        assert set((await shared.generate(request(f"under {version}", new=2))).token_versions) == {version}
    assert set((await task).token_versions) <= {GIVEN, 7}


async def test_weights_that_do_not_fit_change_nothing(shared: ProcessEngine) -> None:
    before = await shared.weight_digests()
    await shared.pause()
    with pytest.raises(WeightSyncError, match="nothing was changed"):
        await shared.update_weights(published(tiny_model(hidden=16), 4, shared))
    await shared.resume()
    assert await shared.weight_digests() == before
    assert shared.stats().version == GIVEN


async def test_sleep_and_wake_reach_the_process(shared: ProcessEngine) -> None:
    await shared.sleep(1)
    with pytest.raises(EngineError, match="asleep"):
        await shared.generate(request())
    await shared.wake()
    assert len((await shared.generate(request())).token_ids) == 8


async def test_state_is_told_while_nobody_asks(shared: ProcessEngine) -> None:
    await shared.pause()
    task = asyncio.ensure_future(shared.generate(request("waiting")))
    async with asyncio.timeout(10):
        while shared.stats().waiting != 1:  # noqa: ASYNC110 - the state has no event; that it arrives is what is tested
            await asyncio.sleep(0.01)
    await shared.resume()
    await task
    assert shared.stats().busy_seconds > 0
    assert shared.stats().slots == 4


async def test_a_killed_process_fails_the_engine_and_all_who_wait(folder: Path) -> None:
    engine = started(folder)
    await engine.pause()
    waiting = [asyncio.ensure_future(engine.generate(one)) for one in mixed_requests(3)]
    await asyncio.sleep(0)
    os.kill(engine.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, EngineError) and "was ended by SIGKILL" in str(one) for one in outcomes)
    assert engine.health() is EngineHealth.FAILED
    with pytest.raises(EngineError, match="was ended by SIGKILL"):
        await engine.generate(request())
    await engine.close()
    assert engine.health() is EngineHealth.CLOSED


async def until_silent(engine: ProcessEngine) -> None:
    async with asyncio.timeout(30):
        while engine.health() is not EngineHealth.SILENT:  # noqa: ASYNC110 - silence has no event
            await asyncio.sleep(0.05)


async def test_a_stopped_process_is_silent_and_goes_on_as_if_nothing_had_happened(shared: ProcessEngine) -> None:
    await shared.pause()
    waiting = asyncio.ensure_future(shared.generate(request("waiting")))
    stop(shared.pid)
    try:
        await until_silent(shared)
        assert shared.stats().silent_seconds >= 1
        assert shared.stats().process == shared.pid
    finally:
        os.kill(shared.pid, signal.SIGCONT)
    await shared.resume()
    assert len((await waiting).token_ids) == 8
    assert shared.health() is EngineHealth.HEALTHY


async def test_an_idle_engine_is_not_silent(shared: ProcessEngine) -> None:
    await asyncio.sleep(2.5)
    assert shared.health() is EngineHealth.HEALTHY
    assert shared.stats().silent_seconds < 2


@pytest.mark.long
async def test_a_process_that_stays_silent_is_killed_and_all_who_wait_are_told(folder: Path) -> None:
    engine = started(folder, TimeoutsConfig(silence_seconds=2.0))
    await engine.pause()
    waiting = [asyncio.ensure_future(engine.generate(one)) for one in mixed_requests(3)]
    await asyncio.sleep(0)
    stop(engine.pid)
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*waiting, engine.resume(), return_exceptions=True)
    for one in outcomes:
        assert isinstance(one, EngineError)
        assert f"its process {engine.pid} showed no sign of life for 2 s (runtime.timeouts.silence_sec" in str(one)
    assert engine.health() is EngineHealth.FAILED
    assert not alive(engine.pid)
    await engine.close()


@pytest.mark.long
async def test_a_stopped_process_is_closed_at_once(folder: Path) -> None:
    engine = started(folder)
    stop(engine.pid)
    await until_silent(engine)
    before = time.monotonic()
    await engine.close()
    assert time.monotonic() - before < 30
    assert not alive(engine.pid)


@pytest.mark.long
def test_a_process_that_does_not_come_up_is_an_error_of_the_setup_and_killed(folder: Path) -> None:
    process = EngineProcess(ModelConfig(path=str(folder)), "cpu", **OPTIONS)
    stop(process.pid)
    with pytest.raises(SetupError, match=r"is not ready after 1 s.*runtime\.timeouts\.start_seconds"):
        ProcessEngine(process, TimeoutsConfig(start_seconds=1.0))
    assert not alive(process.pid)


@pytest.mark.long
async def test_weights_for_a_process_that_is_gone_are_an_error_that_says_so(folder: Path) -> None:
    engine = started(folder)
    publication = published(load_model(ModelConfig(path=str(folder))), 1, engine)
    await engine.prepare(publication)
    await engine.pause()
    os.kill(engine.pid, signal.SIGKILL)
    wait_until_gone(engine.pid)
    for call in (engine.apply, engine.prepare):
        with pytest.raises(EngineError, match="was ended by SIGKILL"):
            await call(publication)
    await engine.close()


@pytest.mark.long
async def test_a_close_that_is_cancelled_closes_nevertheless(folder: Path) -> None:
    engine = started(folder)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not alive(engine.pid)
    assert engine.health() is EngineHealth.CLOSED


@pytest.mark.long
async def test_a_process_that_dies_while_it_is_closed_is_not_waited_for(folder: Path) -> None:
    engine = started(folder)
    stop(engine.pid)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        await closing


@pytest.mark.long
async def test_closing_aborts_what_runs_and_leaves_nothing(folder: Path) -> None:
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    engine = started(folder)
    await engine.pause()
    waiting = asyncio.ensure_future(engine.generate(request()))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(RequestAborted):
        await waiting
    with pytest.raises(EngineError, match="is closed"):
        await engine.generate(request())
    assert not alive(engine.pid)
    assert set(os.listdir("/proc/self/fd")) == descriptors
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not {name for name in left if name.startswith("engine-")}, left


@pytest.mark.long
def test_a_model_that_cannot_be_served_is_an_error_of_the_setup_and_leaves_no_process(folder: Path) -> None:
    process = EngineProcess(ModelConfig(path=str(folder)), "cpu", max_num_seqs=4, max_model_len=100_000)
    with pytest.raises(SetupError, match="max_model_len"):
        ProcessEngine(process)
    assert not alive(process.pid)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_whose_controller_is_killed_ends(folder: Path, tmp_path: Path, stopped: bool) -> None:
    """Also one that is stopped, and that was started from a thread which is gone, as `penstock train` does it."""
    script = tmp_path / "controller.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, threading, time
            from pathlib import Path
            sys.path[:0] = {sys.path!r}
            from tests.engines.test_process_engine import started
            if __name__ == "__main__":
                engines = []
                starting = threading.Thread(target=lambda: engines.append(started(Path({str(folder)!r}))))
                starting.start()
                starting.join()
                print(engines[0].pid, flush=True)
                time.sleep(600)
            """
        )
    )
    controller = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    pid = int(controller.stdout.readline())
    assert alive(pid)
    if stopped:
        stop(pid)
    controller.kill()
    controller.wait()
    controller.stdout.close()
    try:
        wait_until_gone(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
