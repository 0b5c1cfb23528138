"""Bounds on what environments do between two turns of the model: how many at a time, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import TracebackType

from penstock.errors import EnvironmentFailure, EnvironmentTimeout, PenstockError
from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.environments.base import Environment, GenerationHandle, Split, Trajectory, checked_reward
from penstock.rollout.environments.extra_columns import ExtraColumn, declared_columns
from penstock.rollout.environments.rewards.errors import raised_by_user
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.rewards.scores import checked_numbers
from penstock.rollout.environments.rewards.thread_pool import is_being_cancelled
from penstock.rollout.prompts import Message, Prompt
from penstock.text import safe

Play = Callable[[Prompt, GenerationHandle], Awaitable[Trajectory]]


class TurnLimits:
    """At most `workers` environments at work at a time, each for at most `timeout_seconds` between two generations.

    While the model generates, the environment waits: its place is free for another, and its clock stands still.
    """

    def __init__(self, workers: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.places = asyncio.Semaphore(workers)

    async def play(self, play: Play, prompt: Prompt, handle: GenerationHandle, name: str) -> Trajectory:
        """One sample, bounded and checked; anything the environment raises is an `EnvironmentFailure`."""
        work = _Work(self)
        watched = _WatchedHandle(handle, work)
        with watched.knows_responses(), told_as_failures(name):
            try:
                async with work:
                    trajectory = await play(prompt, watched)
            except TimeoutError:
                if not work.expired:
                    raise
                # Without its cause: a bare TimeoutError would count as the machinery's fault.
                raise EnvironmentTimeout(
                    f"{name} took longer than {self.timeout_seconds} s between two turns of the model "
                    "(rollout.environment.timeout_seconds)"
                ) from None
            return watched.checked(trajectory, prompt, name)


@contextmanager
def told_as_failures(what: str) -> Iterator[None]:
    """Anything the user's code raises is an `EnvironmentFailure`; a cancellation from outside stays one."""
    try:
        yield
    except PenstockError:
        raise
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise raised_by_user(what, error) from error
    except GeneratorExit:
        raise
    except BaseException as error:  # also KeyboardInterrupt: a run gets Ctrl-C another way
        raise raised_by_user(what, error) from error


class _Work:
    """The environment's own time in one sample: a place and a running clock, given up while the model generates."""

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        self._clock = asyncio.timeout(None)
        self._holds_place = False
        self._generating = 0
        self._over = False

    @property
    def expired(self) -> bool:
        return self._clock.expired()

    async def __aenter__(self) -> None:
        await self._take_place()
        try:
            await self._clock.__aenter__()
            self._start_clock()
        except BaseException:
            self._leave_place()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        self._leave_place()
        await self._clock.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def model_turn(self) -> AsyncIterator[None]:
        """The model is at work, not the environment; several generations may run if an environment asks for them."""
        self._generating += 1
        self._set_clock(None)
        self._leave_place()
        try:
            yield
        except asyncio.CancelledError:
            await self._go_on_at_once()
            raise
        except BaseException:
            await self._go_on()
            raise
        await self._go_on()

    async def _go_on(self) -> None:
        self._generating -= 1
        if not self._generating:
            try:
                await self._take_place()
            finally:  # the clock runs even if a cancelled wait leaves the environment without a place
                if self._over:  # a generation that nobody waited for
                    self._leave_place()
                else:
                    self._start_clock()

    async def _go_on_at_once(self) -> None:
        """After a cancelled generation: the environment may continue, as it does if it cancelled the generation itself.

        It continues without a place if none is free, since waiting for one would hold up a cancellation from outside.
        """
        self._generating -= 1
        if self._generating or self._over:
            return
        if not self._holds_place and not self._limits.places.locked():
            await self._take_place()
        self._start_clock()

    def _start_clock(self) -> None:
        self._set_clock(asyncio.get_running_loop().time() + self._limits.timeout_seconds)

    def _set_clock(self, when: float | None) -> None:
        if not self._over and not self._clock.expired():  # else it can no longer be set
            self._clock.reschedule(when)

    async def _take_place(self) -> None:
        if not self._holds_place and not self._over:
            await self._limits.places.acquire()
            self._holds_place = True

    def _leave_place(self) -> None:
        if self._holds_place:
            self._holds_place = False
            self._limits.places.release()


class _WatchedHandle:
    """The sample's handle; it stops the environment's clock while the model generates and remembers what it saw."""

    def __init__(self, handle: GenerationHandle, work: _Work) -> None:
        self._handle = handle
        self._work = work
        self._seen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """By request: its context, and the tokens generated."""

    @property
    def uses_chat(self) -> bool:
        return self._handle.uses_chat

    def encode_prompt(self, content: str | Sequence[Message]) -> tuple[int, ...]:
        return self._handle.encode_prompt(content)

    def fit_prompt(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return self._handle.fit_prompt(token_ids)

    def encode(self, text: str) -> tuple[int, ...]:
        return self._handle.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._handle.decode(token_ids)

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        return self._handle.decode_raw(token_ids)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        return self._handle.render_chat(messages, tools)

    async def generate(
        self,
        context_ids: Sequence[int],
        *,
        stop_token_ids: AbstractSet[int] = frozenset(),
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> GenerationResult:
        context = tuple(context_ids)
        async with self._work.model_turn():
            result = await self._handle.generate(
                context, stop_token_ids=stop_token_ids, stop=stop, max_new_tokens=max_new_tokens
            )
        self._seen[result.request_id] = (context, result.token_ids)
        return result

    @contextmanager
    def knows_responses(self) -> Iterator[None]:
        """Failures inside carry what the model has written so far."""
        try:
            yield
        except EnvironmentFailure as failure:
            if failure.response is None and self._seen:
                failure.response = "\n".join(self._handle.decode(written) for _, written in self._seen.values())
            raise

    def checked(self, trajectory: object, prompt: Prompt, name: str) -> Trajectory:
        """Refuse a result that is not a trajectory, or whose tokens are not those that the model saw and wrote."""
        if not isinstance(trajectory, Trajectory):
            raise EnvironmentFailure(f"{name} returned {type(trajectory).__name__}, not a Trajectory")
        said: object = trajectory.response_text
        if not isinstance(said, str):
            raise EnvironmentFailure(
                f"{name} returned a trajectory whose response_text is {type(said).__name__}, not text"
            )
        if not trajectory.length:
            raise EnvironmentFailure(f"{name} returned a trajectory without any token that the model generated")
        before: tuple[int, ...] = ()
        for number, segment in enumerate(trajectory.segments):
            if segment.generation is not None:
                context, written = self._seen.get(segment.generation.request_id, (None, ()))
                if context != before or written[: len(segment.token_ids)] != tuple(segment.token_ids):
                    raise EnvironmentFailure(
                        f"{name}: segment {number} of the trajectory was generated from, or has, other tokens than the "
                        "trajectory says; segments must be what the engine saw, in order"
                    )
            before += tuple(segment.token_ids)
        return replace(
            trajectory,
            reward=checked_reward(trajectory.reward, prompt),
            components=checked_numbers(trajectory.components, prompt, "component"),
            metrics=checked_numbers(trajectory.metrics, prompt, "metric"),
        )


class LimitedEnvironment:
    """An environment whose `run` is bounded and checked; everything else is unchanged. Closing it also ends `pool`."""

    def __init__(self, environment: Environment, limits: TurnLimits, pool: RewardPool | None = None) -> None:
        self.environment = environment
        self._limits = limits
        self._pool = pool

    @property
    def name(self) -> str:
        return safe(self.environment.name)

    @property
    def extra_columns(self) -> tuple[ExtraColumn, ...]:
        return declared_columns(self.environment)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        with told_as_failures(f"{self.name}: prompts({split})"):
            return self.environment.prompts(split)

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return await self._limits.play(self.environment.run, prompt, handle, self.name)

    async def close(self) -> None:
        """Close the environment, which may fail or hang, and then the pool in any case."""
        limit = asyncio.timeout(self._limits.timeout_seconds)
        try:
            with told_as_failures(f"{self.name}: close()"):
                async with limit:
                    await self.environment.close()
        except EnvironmentFailure:
            if not limit.expired():
                raise
            raise EnvironmentTimeout(
                f"{self.name}: close() took longer than {self._limits.timeout_seconds} s "
                "(rollout.environment.timeout_seconds)"
            ) from None
        finally:
            if self._pool is not None:
                await self._pool.close()
