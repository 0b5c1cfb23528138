"""A bounded pool of processes for rewards: a misbehaving reward harms only its own process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import EnvironmentFailure, RewardWorkerLost
from penstock.rollout.environments.rewards.calls import (
    PooledCall,
    PooledProcess,
    and_printed,
    ask_for,
    call_line,
    ended,
    fail,
    load_line,
    raised,
    too_late,
)
from penstock.rollout.environments.rewards.process import ProcessHome, RewardProcess
from penstock.rollout.environments.rewards.signature import Signature
from penstock.rollout.environments.rewards.worker import KEY

_START_SECONDS = 120.0
"""How long a process may take to start and to import a function; imports are slow on a busy machine."""

_CANCELLED_SECONDS = 1.0
"""How long a call that nobody is waiting for may continue before its process is killed."""

_END_SECONDS = 10.0
"""How long to wait for killed processes to end; the kernel may be slow to release one."""

_AHEAD_SECONDS = 0.002
_MOST_AHEAD = 32
"""How much work, and how many calls, are sent to a process together."""

_BACKLOG_SECONDS = 0.02
"""How much work may wait for a process before another is started."""

_PATIENCE_SECONDS = 0.05
"""How long calls wait behind one in a process before they are withdrawn from it."""

_CLOSED = "the pool of reward processes is closed"


class ProcessRewardPool:
    """At most `workers` reward calls at a time, each in a process; functions are named as `module:name`.

    Processes start when needed, import a function outside any call's time limit, and are kept. Calls that are short are
    sent several at a time, and answered one by one: `timeout_seconds` is each call's own. One that outlasts it costs
    its process, which is killed with all that it started. Calls behind one that takes long are withdrawn, and go to
    another process. Only plain data crosses.

    Worked example, 1 worker: `score("m:f")` starts a process, which imports m, and returns; `score("m:g")` uses it
    again, hangs, and after the limit the process is killed and `EnvironmentTimeout` raised; `score("m:f")`, sent behind
    `g`, is sent again to a second process.
    """

    def __init__(
        self,
        workers: int,
        timeout_seconds: float,
        warm_up: str | None = None,
        *,
        on_print: Callable[[str, str], None] = lambda function, text: None,
    ) -> None:
        self._most = workers
        self._timeout = timeout_seconds
        self._warm_up = warm_up
        self._on_print = on_print
        self._home = ProcessHome.here()
        self._waiting: deque[PooledCall] = deque()
        self._workers: list[PooledProcess] = []
        self._killed: list[RewardProcess] = []
        self._burials: set[asyncio.Task[None]] = set()
        self._will_dispatch = False
        self._proven = False
        """Whether a process has got ready once: before that one suffices to try."""
        self._seconds_a_call: float | None = None
        self._closed = False
        self.abandoned = 0
        """Calls that were given up, with their process."""

    def check(self, function: str, key: str) -> Signature:
        """Import a function in a process, and return its parameters.

        Raises `ConfigError` with the setting `key`. Needs no event loop; the process is kept for the first call.
        """
        idle = next((each for each in self._workers if not each.attached), None)
        worker = idle or PooledProcess(RewardProcess(self._home))
        try:
            reply = ask_for(worker.process, function, key, _START_SECONDS)
        except BaseException:
            self._kill(worker.process)
            self._workers = [each for each in self._workers if each is not worker]
            raise
        self._note_printed(function, reply)
        worker.loaded.add(function)
        worker.requests += 1
        if worker not in self._workers:
            self._workers.append(worker)
        self._proven = True
        return Signature(*reply["value"])

    async def score(self, function: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """What `module:name` returns in a process; an error there is an `EnvironmentFailure`.

        Raises `NotPlain` if the arguments cannot cross.
        """
        line = call_line(function, args, kwargs or {})
        if self._closed:
            raise EnvironmentFailure(_CLOSED)
        call = PooledCall(function, line, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._dispatch_soon()
        try:
            return await call.answered
        except asyncio.CancelledError:
            self._nobody_waits(call)
            raise

    def kill(self) -> None:
        """Kill processes that have not had a call yet, without an event loop."""
        for worker in [each for each in self._workers if not each.attached]:
            self._lose(worker)

    async def close(self) -> None:
        """Kill all processes and wait until they have ended; a second call is a no-op."""
        self._closed = True
        for call in self._waiting:
            fail(call, EnvironmentFailure(_CLOSED))
        self._waiting.clear()
        for worker in list(self._workers):
            for call in self._lose(worker):
                fail(call, EnvironmentFailure(f"{_CLOSED}; it was in the middle of a call"))
        for burial in list(self._burials):
            await asyncio.wait({burial})
        deadline = _now() + _END_SECONDS
        while self._killed and _now() < deadline:
            await asyncio.sleep(0.002)
            self._reap()

    # Sending

    def _dispatch_soon(self) -> None:
        """At the end of this turn of the event loop, so that calls made together are sent together."""
        if not self._will_dispatch and not self._closed:
            self._will_dispatch = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._will_dispatch = False
        self._reap()
        self._look_after_idle()
        lines: dict[PooledProcess, list[bytes]] = {}
        while self._waiting:
            if self._waiting[0].over:
                self._waiting.popleft()
                continue
            try:
                worker = self._free_worker(self._waiting[0])
            except OSError as error:
                if self._workers:
                    break  # the existing ones will get to it
                lost = RewardWorkerLost(f"a reward process could not be started: {error}")
                lost.__cause__ = error
                fail(self._waiting.popleft(), lost)
                continue
            if worker is None:
                break
            lines.setdefault(worker, []).extend(self._put(worker, self._waiting.popleft()))
        for worker, added in lines.items():
            worker.process.send(b"".join(added))

    def _free_worker(self, call: PooledCall) -> PooledProcess | None:
        """Who takes a call: an idle process; one that will soon be idle; a new one; or nobody yet."""
        ahead = 1
        if self._seconds_a_call is not None:
            ahead = max(1, min(_MOST_AHEAD, int(_AHEAD_SECONDS / max(self._seconds_a_call, 1e-6))))
        candidates = [
            worker
            for worker in self._workers
            if not (worker.ending or worker.slow)
            and len(worker.sent) < (ahead if call.function in worker.loaded else 1)
        ]
        if candidates:
            return min(candidates, key=lambda worker: len(worker.sent))
        if len(self._workers) < (self._most if self._proven else 1) and self._worth_a_process():
            worker = PooledProcess(RewardProcess(self._home))
            self._workers.append(worker)
            self._attach(worker)
            return worker
        return None

    def _worth_a_process(self) -> bool:
        """Whether the existing processes will not soon finish what waits; known after the first call."""
        serving = sum(not (worker.slow or worker.ending) for worker in self._workers)
        return not serving or (self._seconds_a_call or 0.0) * len(self._waiting) > _BACKLOG_SECONDS * serving

    def _attach(self, worker: PooledProcess) -> None:
        worker.attached = True
        worker.process.attach(lambda replies: self._replied(worker, replies), lambda: self._bury_soon(worker))

    def _look_after_idle(self) -> None:
        """Forget idle processes that have ended, which is no call's fault; attach those made before the event loop."""
        for worker in list(self._workers):
            if not worker.sent and not worker.process.running:
                self._lose(worker)
            elif not worker.attached:
                self._attach(worker)

    def _put(self, worker: PooledProcess, call: PooledCall) -> list[bytes]:
        """Queue a call in a worker, behind the functions that it needs; returns what must be sent for it."""
        added = []
        warm_up = () if self._warm_up is None else (self._warm_up,)
        for function in (*warm_up, call.function):
            if function not in worker.loaded:
                added.append(PooledCall(function, load_line(function), call.answered, is_load=True))
                if function == self._warm_up:
                    added.append(PooledCall(function, call_line(function, (), {}), call.answered, is_load=True))
        added.append(call)
        idle = not worker.sent
        worker.put(added)
        if idle:
            self._begin(worker)
        return [each.line for each in added]

    # Time limits

    def _begin(self, worker: PooledProcess) -> None:
        """The clock of the first call starts."""
        worker.slow = False
        worker.begun = _now()
        self._proven = self._proven or not worker.sent[0].is_load
        worker.deadline = worker.begun + (_START_SECONDS if worker.sent[0].is_load else self._timeout)
        self._set_timer(worker)

    def _set_timer(self, worker: PooledProcess) -> None:
        """For the next look at the first call. One that is set for an earlier time stays: few calls need their own."""
        when = worker.deadline if worker.slow else min(worker.deadline, worker.begun + _PATIENCE_SECONDS)
        if worker.timer is not None:
            if worker.timer.when() <= when:
                return
            worker.timer.cancel()
        worker.timer = asyncio.get_running_loop().call_at(when, self._look_at, worker)

    def _look_at(self, worker: PooledProcess) -> None:
        worker.timer = None
        if not worker.sent or worker.ending:
            return
        if _now() >= worker.deadline:
            self._time_out(worker)
            return
        if not worker.slow and _now() >= worker.begun + _PATIENCE_SECONDS:
            self._send_anew(worker.withdraw())
        self._set_timer(worker)

    def _time_out(self, worker: PooledProcess) -> None:
        call, printed = worker.sent[0], worker.process.printed()
        rest = self._lose(worker)
        self.abandoned += 1
        if not call.over:
            self._measured(self._timeout)
        self._say_printed(call.function, printed)
        fail(call, too_late(call, _START_SECONDS if call.is_load else self._timeout, printed))
        self._send_anew(rest)

    def _nobody_waits(self, call: PooledCall) -> None:
        """A call was cancelled: one that is at work may end by itself, soon."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)
        for worker in self._workers:
            if worker.sent and worker.sent[0].answered is call.answered and not worker.sent[0].is_load:
                worker.deadline = min(worker.deadline, _now() + _CANCELLED_SECONDS)
                self._set_timer(worker)

    # Answers

    def _replied(self, worker: PooledProcess, replies: list[dict[str, Any]]) -> None:
        for reply in replies:
            call = worker.sent.popleft()
            self._note_printed(call.function, reply)
            if call.withdrawn:
                pass
            elif "skipped" in reply:
                self._send_anew([call])
            elif call.is_load:
                self._loaded(worker, call, reply)
            else:
                if worker.warm:
                    self._measured(reply["took"])
                worker.warm = True
                if "error" in reply:
                    fail(call, raised(reply))
                elif not call.over:
                    call.answered.set_result(reply["value"])
            worker.slow = False
            if worker.sent:
                self._begin(worker)
        if self._waiting:
            self._dispatch_soon()

    def _measured(self, seconds: float) -> None:
        """What recent calls took on average: nothing is sent to wait behind calls that may well hang."""
        known = self._seconds_a_call
        self._seconds_a_call = seconds if known is None else 0.8 * known + 0.2 * seconds

    def _loaded(self, worker: PooledProcess, call: PooledCall, reply: dict[str, Any]) -> None:
        if "problems" in reply:
            problem = "; ".join(reply["problems"]).removeprefix(f"{KEY}: ")
        elif "error" in reply:
            problem = f"a reward process could not start: {reply['error']['text']}"
        else:
            worker.loaded.add(call.function)
            return
        fail(call, EnvironmentFailure(problem + and_printed(reply.get("printed", ""))))

    def _bury_soon(self, worker: PooledProcess) -> None:
        worker.ending = True
        burial = asyncio.get_running_loop().create_task(self._bury(worker))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def _bury(self, worker: PooledProcess) -> None:
        """A process has ended, or at least closed its connection: the running call fails, the rest are sent again."""
        code = await asyncio.to_thread(worker.process.exit_code)
        if worker not in self._workers:
            return
        call = worker.sent[0] if worker.sent else None
        printed = worker.process.printed()
        rest = self._lose(worker)
        if call is not None:
            self.abandoned += 1
            self._say_printed(call.function, printed)
            fail(call, ended(call, code, printed))
        self._send_anew(rest)

    def _send_anew(self, calls: Sequence[PooledCall]) -> None:
        again = [call for call in calls if not (call.over or call.is_load or call.withdrawn)]
        self._waiting.extendleft(reversed(again))
        self._dispatch_soon()

    # Ends

    def _lose(self, worker: PooledProcess) -> list[PooledCall]:
        """Kill a worker's process; returns the calls it has not answered."""
        self._workers.remove(worker)
        if worker.timer is not None:
            worker.timer.cancel()
        self._kill(worker.process)
        return list(worker.sent)

    def _kill(self, process: RewardProcess) -> None:
        process.kill()
        self._killed.append(process)

    def _reap(self) -> None:
        self._killed = [process for process in self._killed if not process.reaped()]

    def _note_printed(self, function: str, reply: dict[str, Any]) -> None:
        self._say_printed(function, reply.get("printed", ""))

    def _say_printed(self, function: str, text: str) -> None:
        if text:
            self._on_print(function, text)


def _now() -> float:
    return asyncio.get_running_loop().time()
