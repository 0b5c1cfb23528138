"""Bounds on what environments do between turns, and the check of what they return."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.controller.failures.classify import classify
from penstock.errors import EngineError, EnvironmentFailure, EnvironmentTimeout, FailureKind, WrongReward
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments import GenerationHandle, Prompt, Segment, Split, Trajectory
from penstock.rollout.environments.limits import LimitedEnvironment, TurnLimits
from penstock.rollout.environments.rewards.pool import RewardPool
from tests.rollout.talking import Talker

PROMPT = Prompt("7", "go")
Run = Callable[[Prompt, GenerationHandle], Awaitable[Trajectory]]


async def play(run: Run, *, seconds: float = 5, workers: int = 1, limits: TurnLimits | None = None) -> Trajectory:
    talker = Talker(lambda text: "a")
    return await (limits or TurnLimits(workers, seconds)).play(run, PROMPT, talker.handle(), "mine")


async def one_turn(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
    ids = handle.encode_prompt(prompt.content)
    generation = await handle.generate(ids)
    return Trajectory((Segment(ids), Segment(generation.token_ids, generation)), 1.0, "")


async def test_what_an_environment_raises_is_its_failure_with_the_cause() -> None:
    async def raising(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        raise KeyError("answer")

    with pytest.raises(EnvironmentFailure, match="mine raised KeyError") as caught:
        await play(raising)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_what_an_environment_raises_has_its_line_and_what_the_model_wrote() -> None:
    async def raising(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        for _ in range(2):
            await handle.generate((5,))
        raise KeyError("answer")

    with pytest.raises(
        EnvironmentFailure, match=r"mine raised KeyError: 'answer' \(test_limits.py, line \d+, in raising\)"
    ) as caught:
        await play(raising)
    failure = caught.value
    assert failure.response == "a\na"
    assert failure.trace is not None
    assert failure.trace.cause.startswith(f"KeyError at {__file__}:")
    assert failure.trace.traceback.count("  File ") == 1


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"components": {"form": "good"}}, "the component 'form' of prompt 7 is 'good', not a finite number"),
        ({"metrics": {"turns": float("inf")}}, "the metric 'turns' of prompt 7 is inf, not a finite number"),
        ({"metrics": [1.0]}, r"the metrics of prompt 7 are \[1.0\], not a mapping of numbers"),
        ({"metrics": {str(n): 1.0 for n in range(65)}}, "prompt 7 has 65 metrics; at most 64 are allowed"),
    ],
)
async def test_components_and_metrics_that_are_no_numbers_are_failures(numbers: dict[str, Any], match: str) -> None:
    async def wrong(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return replace(await one_turn(prompt, handle), **numbers)

    with pytest.raises(WrongReward, match=match):
        await play(wrong)


async def test_what_the_engine_raises_stays_the_engines() -> None:
    def script(request: Any) -> ScriptedResponse:
        raise EngineError("gone")

    talker = Talker(lambda text: "a")
    talker.engine = ScriptedEngine(script)
    with pytest.raises(EngineError, match="gone"):
        await TurnLimits(1, 5).play(one_turn, PROMPT, talker.handle(), "mine")


async def test_async_code_that_hangs_is_given_up() -> None:
    async def hanging(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        await handle.generate((5,))
        await asyncio.Event().wait()
        raise AssertionError

    limits = TurnLimits(1, 0.05)
    for _ in range(2):
        with pytest.raises(EnvironmentTimeout, match=r"mine took longer than 0\.05 s .*timeout_seconds") as caught:
            await play(hanging, limits=limits)
        assert classify(caught.value) is FailureKind.DATA
    assert (await play(one_turn, limits=limits)).reward == 1.0


async def test_a_timeout_of_its_own_is_not_taken_for_the_limit() -> None:
    async def impatient(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        raise TimeoutError("the judge does not answer")

    with pytest.raises(EnvironmentFailure, match="the judge does not answer") as caught:
        await play(impatient)
    assert not isinstance(caught.value, EnvironmentTimeout)


async def test_the_time_of_generation_is_not_the_environments() -> None:
    talker = Talker(lambda text: "a")
    talker.engine = ScriptedEngine(lambda request: ScriptedResponse(0.15, (5, 1)))
    trajectory = await TurnLimits(1, 0.05).play(one_turn, PROMPT, talker.handle(), "mine")
    assert trajectory.length == 2


async def test_no_more_environments_work_at_a_time_than_there_are_workers_but_more_may_generate() -> None:
    working, most_working, most_generating = 0, 0, 0
    talker = Talker(lambda text: "a")
    all_there = asyncio.Event()
    waiting = 0

    async def run(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        nonlocal working, most_working, most_generating, waiting

        async def work() -> None:
            nonlocal working, most_working
            working += 1
            most_working = max(most_working, working)
            await asyncio.sleep(0)
            working -= 1

        await work()
        waiting += 1
        if waiting == 6:
            all_there.set()
        trajectory = await one_turn(prompt, handle)
        await work()
        return trajectory

    generate = talker.engine.generate

    async def together(request: Any) -> Any:
        nonlocal most_generating
        await all_there.wait()
        result = await generate(request)
        most_generating = max(most_generating, waiting)
        return result

    talker.engine.generate = together  # type: ignore[method-assign]
    limits = TurnLimits(2, 5)
    handles = [talker.handle(f"grp_g{i}") for i in range(6)]
    await asyncio.gather(*(limits.play(run, PROMPT, handle, "mine") for handle in handles))
    assert (most_working, most_generating) == (2, 6)
    assert limits.places._value == 2


async def test_cancelling_a_sample_frees_its_place() -> None:
    limits = TurnLimits(1, 5)
    started = asyncio.Event()

    async def hanging(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(play(hanging, limits=limits))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await play(one_turn, limits=limits)).reward == 1.0


async def test_only_trajectories_of_what_the_engine_saw_are_accepted() -> None:
    async def no_trajectory(prompt: Prompt, handle: GenerationHandle) -> Any:
        return 1.0

    async def bad_reward(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return replace(await one_turn(prompt, handle), reward=float("nan"))

    async def other_context(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        played = await one_turn(prompt, handle)
        return replace(played, segments=(Segment((9, 9)), played.segments[1]))

    async def other_tokens(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        played = await one_turn(prompt, handle)
        return replace(played, segments=(played.segments[0], replace(played.segments[1], token_ids=(9, 1))))

    async def unspoken(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return replace(await one_turn(prompt, handle), segments=(Segment((9, 9)),))

    async def text_for_reward(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return replace(await one_turn(prompt, handle), reward="1.0")  # type: ignore[arg-type]

    async def foreign(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        played = await one_turn(prompt, handle)
        generation = replace(played.segments[1].generation, request_id="other")  # type: ignore[type-var]
        return replace(played, segments=(played.segments[0], Segment(played.segments[1].token_ids, generation)))

    for run, match in (
        (no_trajectory, "returned float, not a Trajectory"),
        (bad_reward, "nan"),
        (other_context, "segment 1 .*other tokens"),
        (other_tokens, "segment 1 .*other tokens"),
        (foreign, "segment 1 .*other tokens"),
        (unspoken, "without any token that the model generated"),
        (text_for_reward, "'1.0', not a number"),
    ):
        with pytest.raises(EnvironmentFailure, match=match):
            await play(run)


async def test_rewards_are_kept_as_plain_numbers() -> None:
    async def right(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return replace(await one_turn(prompt, handle), reward=True)

    assert type((await play(right)).reward) is float


async def give_up_within_a_task(handle: GenerationHandle) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(handle.generate((5,)), 0.02)


async def give_up_here(handle: GenerationHandle) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.02):
            await handle.generate((5,))


@pytest.mark.parametrize("give_up", [give_up_within_a_task, give_up_here])
async def test_the_clock_runs_on_after_a_generation_that_the_environment_gave_up(give_up: Any) -> None:
    talker = Talker(lambda text: "a")
    talker.engine = ScriptedEngine(lambda request: ScriptedResponse(60.0))
    limits = TurnLimits(1, 0.1)

    async def impatient(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        await give_up(handle)
        assert limits.places.locked(), "it works again, and has a place"
        await asyncio.wait_for(asyncio.Event().wait(), 5)
        raise AssertionError

    with pytest.raises(EnvironmentTimeout):
        await limits.play(impatient, PROMPT, talker.handle(), "mine")
    assert limits.places._value == 1


async def test_the_clock_runs_on_where_the_environment_gave_up_waiting_for_a_place() -> None:
    limits = TurnLimits(1, 0.1)

    async def impatient(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        generation = asyncio.create_task(handle.generate((5,)))
        await asyncio.sleep(0)
        await limits.places.acquire()  # another environment's work
        await give_up_on(generation)
        await asyncio.wait_for(asyncio.Event().wait(), 5)
        raise AssertionError

    async def give_up_on(generation: asyncio.Task[Any]) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(generation, 0.02)

    with pytest.raises(EnvironmentTimeout):
        await play(impatient, limits=limits)


async def test_segments_that_are_none_are_the_environments_failure() -> None:
    async def words(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return replace(await one_turn(prompt, handle), segments=("go", "a"))  # type: ignore[arg-type]

    with pytest.raises(EnvironmentFailure, match="mine raised AttributeError"):
        await play(words)


async def test_a_generation_asked_for_when_time_is_up_does_not_hide_that() -> None:
    async def clinging(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        try:
            await asyncio.Event().wait()
        finally:
            await handle.generate((5,))
        raise AssertionError

    with pytest.raises(EnvironmentTimeout):
        await play(clinging, seconds=0.05)


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), SystemExit(3)])
async def test_what_would_end_the_run_is_a_failure_where_the_environment_raises_it(raised: BaseException) -> None:
    async def ending(prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        await asyncio.sleep(0)
        raise raised

    with pytest.raises(EnvironmentFailure, match=f"mine raised {type(raised).__name__}"):
        await play(ending)


class Closing:
    """An environment of the user's whose end goes wrong."""

    name = "closing"

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close

    def prompts(self, split: Split) -> list[Prompt]:
        raise OSError("no disk")

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        raise AssertionError

    async def close(self) -> None:
        await self._close()


async def hang() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise KeyError("server")


@pytest.mark.parametrize(
    ("close", "kind", "match"),
    [
        (fail, EnvironmentFailure, r"closing: close\(\) raised KeyError: 'server'"),
        (hang, EnvironmentTimeout, r"closing: close\(\) took longer than 0\.05 s"),
    ],
)
async def test_an_environment_that_cannot_be_closed_says_so_and_its_pool_is_closed(
    close: Any, kind: type[Exception], match: str
) -> None:
    pool = RewardPool(1, 5)
    await pool.score(lambda: 1.0)
    limited = LimitedEnvironment(Closing(close), TurnLimits(1, 0.05), pool)
    with pytest.raises(kind, match=match):
        await limited.close()
    assert not pool._threads._idle
    with pytest.raises(EnvironmentFailure, match=r"prompts\(Split\.TRAIN\) raised OSError: no disk"):
        limited.prompts(Split.TRAIN)
