"""The controller's side of an engine in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.errors import EngineError, PenstockError, RequestAborted, SetupError, WorkerClosed, WorkerLost
from penstock.rollout.engines.base import EngineHealth, EngineStats, GenerationRequest, GenerationResult
from penstock.rollout.engines.process.spawn import EngineProcess
from penstock.runtime.cancellation import to_the_end
from penstock.text import named_error
from penstock.weights.publication import WeightPublication, WeightSite

_SERVING = (EngineHealth.HEALTHY, EngineHealth.PAUSED)


class ProcessEngine:
    """A `GenerationEngine` whose model and thread live in an `EngineProcess`; every call is made there.

    Published weights are read by the process itself; only what describes them passes through here. `stats` and `health`
    are as of the last message, at most a fraction of a second old.

    A process that ends, for any reason, fails the engine: pending calls raise `EngineError`. One that is stopped, or
    hangs as a whole, shows no sign of life: it is SILENT, and killed after `timeouts.silence_seconds`.
    """

    def __init__(self, process: EngineProcess, timeouts: TimeoutsConfig | None = None) -> None:
        self._timeouts = timeouts or TimeoutsConfig()
        self._name, self._worker = process.name, process.worker
        self._worker.silence_seconds = self._timeouts.silence_seconds
        self._closing = self._closed = False
        try:
            with self._as_engine_errors():
                self._site = self._await_start()
        except BaseException:
            self._worker.kill()
            raise

    def _await_start(self) -> WeightSite:
        limit = self._timeouts.start_seconds
        try:
            self._worker.wait_built(limit)
            site: WeightSite = self._worker.call_blocking("weight_site", seconds=limit)
        except TimeoutError:
            raise SetupError(
                f"engine {self._name}: its process {self.pid} is not ready after {limit:g} s; if the model takes "
                "longer to load, raise runtime.timeouts.start_seconds"
            ) from None
        return site

    @property
    def name(self) -> str:
        """For messages."""
        return self._name

    @property
    def site(self) -> WeightSite:
        """Where its weights live: its process, and the device that it computes on."""
        return self._site

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._worker.pid

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate one response; waits while the slots are taken or the engine is paused."""
        result: GenerationResult = await self._ask("generate", request)
        return result

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now: their `generate` calls raise `RequestAborted`. Unknown ids are ignored."""
        with contextlib.suppress(EngineError):  # an engine that is gone has no requests left to end
            await self._ask("abort", list(request_ids))

    async def preempt(self) -> None:
        """Give all requests back at a token boundary: each `generate` call returns what it has so far."""
        await self._ask("preempt")

    def when_lost(self, call: Callable[[EngineError], None]) -> None:
        """Call this with the cause when the process has ended; at once if it already has."""
        self._worker.when_lost(lambda lost: call(EngineError(str(lost))))

    async def pause(self) -> None:
        """Returns once the engine is at a token boundary; running requests keep their place."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Continue generating."""
        await self._ask("resume")

    async def prepare(self, publication: WeightPublication) -> None:
        """Have published weights checked and fetched in the process; it serves meanwhile."""
        await self._ask("prepare", publication)
        self._site = await self._ask("weight_site")  # it may have found that its GPU cannot be reached

    async def apply(self, publication: WeightPublication) -> None:
        """Copy the weights that were prepared, then take over their version; only while paused."""
        await self._ask("apply", publication)

    async def update_weights(self, publication: WeightPublication) -> None:
        """`prepare` and `apply` in one call; only while paused."""
        if self.health() is EngineHealth.HEALTHY:
            raise EngineError(f"engine {self._name}: update_weights needs a paused engine; call pause() first")
        await self.prepare(publication)
        await self.apply(publication)

    async def weight_digests(self) -> dict[str, str]:
        """A hash of every weight that it serves, taken at a token boundary."""
        digests: dict[str, str] = await self._ask("weight_digests")
        return digests

    async def sleep(self, level: int = 1) -> None:
        """Free the key-value cache (level 1) and the weights too (level 2); refused while it has requests."""
        await self._ask("sleep", level)

    async def wake(self) -> None:
        """Take the memory again; after level 2 the engine serves only once it has new weights."""
        await self._ask("wake")

    def stats(self) -> EngineStats:
        """Counters since the start."""
        state = self._worker.state
        known = EngineStats() if state is None else state.stats
        return replace(known, process=self.pid, silent_seconds=self._worker.silent_seconds)

    def health(self) -> EngineHealth:
        """A sleeping engine counts as paused, and one whose process shows no sign of life as silent."""
        if self._closed:
            return EngineHealth.CLOSED
        if self._worker.why_lost:
            return EngineHealth.FAILED
        state = self._worker.state
        health: EngineHealth = EngineHealth.PAUSED if state is None else state.health
        return EngineHealth.SILENT if health in _SERVING and self._worker.is_silent else health

    async def close(self) -> None:
        """Abort running requests and end the process, even if the caller is cancelled; a second call is a no-op."""
        if not self._closing:
            self._closing = True
            await to_the_end(self._close())

    async def _close(self) -> None:
        try:
            with contextlib.suppress(EngineError), self._as_engine_errors():  # it has ended nevertheless
                await self._worker.close()
        finally:
            self._closed = True

    async def _ask(self, method: str, *args: Any) -> Any:
        with self._as_engine_errors():
            return await self._worker.call(method, *args)

    @contextlib.contextmanager
    def _as_engine_errors(self) -> Iterator[None]:
        """Whatever is wrong with the process is wrong with the engine."""
        try:
            yield
        except WorkerClosed as error:
            raise RequestAborted(str(error)) from None
        except WorkerLost as error:
            raise EngineError(str(error)) from None
        except PenstockError:
            raise
        except Exception as error:
            raise EngineError(f"engine {self._name}: {named_error(error)}") from error
