"""A bounded pool of processes for rewards: whatever a reward does, it does it to a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout, RewardWorkerLost
from penstock.rollout.environments.plain_data import encode
from penstock.rollout.environments.reward_errors import as_exception
from penstock.rollout.environments.reward_process import Home, RewardProcess

_START_SECONDS = 120.0
"""How long a process may take to start and to import a function; imports are slow on a busy machine."""

_CANCELLED_SECONDS = 1.0
"""How long a call that nobody waits for any more may go on before it costs its process."""

_END_SECONDS = 10.0
"""How long the end of killed processes is waited for; the kernel may be slow to let one go."""

_AHEAD_SECONDS = 0.002
_MOST_AHEAD = 32
"""How much work, and how many calls, are sent to a process together."""

_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""How a process ends that somebody else has ended: a person, a batch system, a machine out of memory."""

_CLOSED = "the pool of reward processes is closed"
_LONGEST_PRINTED = 1000


@dataclass(eq=False)
class _Call:
    """A call that somebody waits for, or a function that must be there first."""

    function: str
    line: bytes
    answered: asyncio.Future[Any]
    is_load: bool = False

    @property
    def over(self) -> bool:
        return self.answered.done()


@dataclass(eq=False)
class _Worker:
    """A process and what it has been sent: the first call is at work, the others wait inside."""

    process: RewardProcess
    loaded: set[str] = field(default_factory=set)
    sent: deque[_Call] = field(default_factory=deque)
    deadline: float = 0.0
    """When the first call is out of time."""
    timer: asyncio.TimerHandle | None = None
    attached: bool = False


class ProcessRewardPool:
    """At most `workers` reward calls at a time, each in a process; functions are named as `module:name`.

    Processes start when needed, import a function outside of any call's time, and are kept. Calls that are short are
    sent several at a time, and answered one by one: `timeout_seconds` is each call's own. One that outlasts it costs
    its process, which is killed with all that it started; those behind it go to another. Only plain data crosses.

    Worked example, 1 worker: `score("m:f")` starts a process, which imports m, and returns; `score("m:g")` uses it
    again, hangs, and after the limit the process is killed and `EnvironmentTimeout` raised; `score("m:f")`, sent
    behind `g`, is sent anew to a second process.
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
        self._home = Home.here()
        self._waiting: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._killed: list[RewardProcess] = []
        self._burials: set[asyncio.Task[None]] = set()
        self._will_dispatch = False
        self._proven = False
        """Whether a process has got ready once: before that one suffices to try."""
        self._seconds_a_call: float | None = None
        self._closed = False
        self.abandoned = 0
        """Calls that were given up, with their process."""

    def check(self, function: str, key: str, names: Sequence[str]) -> None:
        """Import a function in a process, and look whether it can be called as a reward with keywords `names`.

        Raises `ConfigError` with the setting `key`. Needs no event loop; the process is kept for the first call.
        """
        process = RewardProcess(self._home)
        try:
            reply = _checked(process, function, key, names)
        except BaseException:
            self._kill(process)
            raise
        self._note_printed(function, reply)
        self._workers.append(_Worker(process, {function}))
        self._proven = True

    async def score(self, function: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """What `module:name` returns in a process; what goes wrong there is an `EnvironmentFailure`.

        Raises `NotPlain` where the arguments cannot cross.
        """
        line = encode({"function": function, "args": list(args), "kwargs": dict(kwargs or {})}).encode() + b"\n"
        if self._closed:
            raise EnvironmentFailure(_CLOSED)
        call = _Call(function, line, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._dispatch_soon()
        try:
            return await call.answered
        except asyncio.CancelledError:
            self._nobody_waits(call)
            raise

    async def close(self) -> None:
        """Kill all processes and wait for their end; a second call is a no-op."""
        self._closed = True
        for call in self._waiting:
            _fail(call, EnvironmentFailure(_CLOSED))
        self._waiting.clear()
        for worker in list(self._workers):
            for call in self._lose(worker):
                _fail(call, EnvironmentFailure(f"{_CLOSED}; it was in the middle of a call"))
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
        lines: dict[_Worker, list[bytes]] = {}
        while self._waiting:
            if self._waiting[0].over:
                self._waiting.popleft()
                continue
            try:
                worker = self._free_worker(self._waiting[0])
            except OSError as error:
                lost = RewardWorkerLost(f"a reward process could not be started: {error}")
                lost.__cause__ = error
                _fail(self._waiting.popleft(), lost)
                continue
            if worker is None:
                break
            lines.setdefault(worker, []).extend(self._put(worker, self._waiting.popleft()))
        for worker, added in lines.items():
            worker.process.send(b"".join(added))

    def _free_worker(self, call: _Call) -> _Worker | None:
        """Who takes a call: an idle process; one that will soon be idle; a new one; or nobody yet."""
        ahead = 1
        if self._seconds_a_call is not None:
            ahead = max(1, min(_MOST_AHEAD, int(_AHEAD_SECONDS / max(self._seconds_a_call, 1e-6))))
        candidates = [w for w in self._workers if len(w.sent) < (ahead if call.function in w.loaded else 1)]
        if candidates:
            return self._attached(min(candidates, key=lambda worker: len(worker.sent)))
        if len(self._workers) < (self._most if self._proven else 1):
            worker = _Worker(RewardProcess(self._home))
            self._workers.append(worker)
            return self._attached(worker)
        return None

    def _attached(self, worker: _Worker) -> _Worker | None:
        if not worker.attached:
            if not worker.process.running:  # it was made before there was an event loop, and is gone since
                self._lose(worker)
                return None if not self._waiting else self._free_worker(self._waiting[0])
            worker.attached = True
            worker.process.attach(lambda replies: self._replied(worker, replies), lambda: self._bury_soon(worker))
        return worker

    def _put(self, worker: _Worker, call: _Call) -> list[bytes]:
        """Line a call up in a worker, behind the functions that it needs; what has to be sent for it."""
        added = []
        warm_up = () if self._warm_up is None else (self._warm_up,)
        for function in (*warm_up, call.function):
            if function not in worker.loaded:
                worker.loaded.add(function)
                added.append(_Call(function, _load_line(function), call.answered, is_load=True))
                if function == self._warm_up:
                    line = encode({"function": function, "args": [], "kwargs": {}}).encode() + b"\n"
                    added.append(_Call(function, line, call.answered, is_load=True))
        added.append(call)
        idle = not worker.sent
        worker.sent.extend(added)
        if idle:
            self._begin(worker)
        return [each.line for each in added]

    # Time limits

    def _begin(self, worker: _Worker) -> None:
        """The clock of the first call starts."""
        seconds = _START_SECONDS if worker.sent[0].is_load else self._timeout
        self._set_deadline(worker, _now() + seconds)

    def _set_deadline(self, worker: _Worker, deadline: float) -> None:
        """A timer that is set for an earlier time stays, and looks then: most calls never need one of their own."""
        worker.deadline = deadline
        if worker.timer is not None:
            if worker.timer.when() <= deadline:
                return
            worker.timer.cancel()
        worker.timer = asyncio.get_running_loop().call_at(deadline, self._check_time, worker)

    def _check_time(self, worker: _Worker) -> None:
        worker.timer = None
        if not worker.sent:
            return
        if _now() < worker.deadline:
            self._set_deadline(worker, worker.deadline)
            return
        call, printed = worker.sent[0], worker.process.printed()
        rest = self._lose(worker)
        self.abandoned += 1
        self._say_printed(call.function, printed)
        if call.is_load:
            # Not a timeout of the environment's: what it says of the reward and its setting would be wrong.
            late: EnvironmentFailure = RewardWorkerLost(
                f"a reward process did not start, with {call.function} imported, within {_START_SECONDS} s"
                + _printed(printed)
            )
        else:
            late = EnvironmentTimeout(
                f"the reward took longer than {self._timeout} s (rollout.environment.timeout_seconds); its process "
                "was ended" + _printed(printed)
            )
        _fail(call, late)
        self._send_anew(rest)

    def _nobody_waits(self, call: _Call) -> None:
        """A call was cancelled: one that is at work may end by itself, soon."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)
        for worker in self._workers:
            if worker.sent and worker.sent[0].answered is call.answered and not worker.sent[0].is_load:
                self._set_deadline(worker, min(worker.deadline, _now() + _CANCELLED_SECONDS))

    # Answers

    def _replied(self, worker: _Worker, replies: list[dict[str, Any]]) -> None:
        for reply in replies:
            call = worker.sent.popleft()
            self._note_printed(call.function, reply)
            if call.is_load:
                self._loaded(worker, call, reply)
            else:
                known = self._seconds_a_call
                self._seconds_a_call = reply["took"] if known is None else 0.8 * known + 0.2 * reply["took"]
                if "error" in reply:
                    _fail(call, _raised(reply))
                elif not call.over:
                    call.answered.set_result(reply["value"])
            if worker.sent:
                self._begin(worker)
        if self._waiting:
            self._dispatch_soon()

    def _loaded(self, worker: _Worker, call: _Call, reply: dict[str, Any]) -> None:
        if "problems" in reply:
            _fail(call, EnvironmentFailure("; ".join(reply["problems"]) + _printed(reply.get("printed", ""))))
        elif "error" in reply:
            _fail(call, EnvironmentFailure(f"a reward process could not start: {reply['error']['text']}"))
        else:
            self._proven = True
            return
        # A function that is not there is asked for again, and so is the call that has failed with it.
        worker.loaded.discard(call.function)

    def _bury_soon(self, worker: _Worker) -> None:
        burial = asyncio.get_running_loop().create_task(self._bury(worker))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def _bury(self, worker: _Worker) -> None:
        """A process has ended, or at least closed its connection: the call at work is told, the rest sent anew."""
        code = await asyncio.to_thread(worker.process.exit_code)
        if worker not in self._workers:
            return
        call = worker.sent[0] if worker.sent else None
        printed = worker.process.printed()
        rest = self._lose(worker)
        if call is not None:
            self.abandoned += 1
            self._say_printed(call.function, printed)
            what = f"while it imported {call.function}" if call.is_load else "in the middle of a call"
            how = f"ended with code {code}" if code is not None else "closed its connection"
            lost = RewardWorkerLost if code in _FROM_OUTSIDE else EnvironmentFailure
            _fail(call, lost(f"the reward process {how} {what}{_printed(printed)}"))
        self._send_anew(rest)

    def _send_anew(self, calls: Sequence[_Call]) -> None:
        self._waiting.extendleft(reversed([call for call in calls if not call.over and not call.is_load]))
        self._dispatch_soon()

    # Ends

    def _lose(self, worker: _Worker) -> list[_Call]:
        """Kill a worker's process; what it was sent and has not answered."""
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


def _checked(process: RewardProcess, function: str, key: str, names: Sequence[str]) -> dict[str, Any]:
    """The reply of a process that was asked for a function before there is an event loop."""
    try:
        reply = process.ask(_load_line(function, names), _START_SECONDS)
    except TimeoutError:
        problem = f"{key}: importing {function} took longer than {_START_SECONDS} s"
    except (EOFError, OSError):
        problem = f"{key}: importing {function} ended its process with code {process.exit_code()}"
    else:
        if "problems" not in reply:
            return reply
        raise ConfigError(reply["problems"])
    raise ConfigError([problem + _printed(process.printed())])


def _load_line(function: str, names: Sequence[str] | None = None) -> bytes:
    return encode({"load": function, "names": None if names is None else list(names)}).encode() + b"\n"


def _fail(call: _Call, error: Exception) -> None:
    if not call.over:
        call.answered.set_exception(error)


def _raised(reply: dict[str, Any]) -> EnvironmentFailure:
    told = reply["error"]
    failure = EnvironmentFailure(f"the reward function raised {told['text']}{_printed(reply.get('printed', ''))}")
    failure.__cause__ = as_exception(told)
    return failure


def _printed(text: str) -> str:
    """What a failed call has printed, for its message: the end of it, which is nearest to the failure."""
    if not text.strip():
        return ""
    return f"; it printed {'…' if len(text) > _LONGEST_PRINTED else ''}{text[-_LONGEST_PRINTED:]!r}"
