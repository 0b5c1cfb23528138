"""`verifiers:<environment>`: environments of the verifiers package, played by Penstock's engine.

Only the files whose names begin with `verifiers_` import verifiers, and they are imported only when such an environment
is requested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import verifiers.v1 as vf

from penstock.errors import EnvironmentFailure
from penstock.rollout.environments.base import GenerationHandle, Split, Trajectory
from penstock.rollout.environments.limits import TurnLimits
from penstock.rollout.environments.rewards.errors import raised_by_user, told_by_others
from penstock.rollout.environments.turns.conversation import Conversation
from penstock.rollout.environments.verifiers.client import EngineClient, Sample
from penstock.rollout.environments.verifiers.tasks import load_verifiers, read_tasks
from penstock.rollout.prompts import Prompt

_START_SECONDS = 120.0
"""How long verifiers' servers may take to start."""


class VerifiersEnvironment:
    """One episode per sample; its one trainable trace is the trajectory.

    The first `eval_size` tasks of the taskset are held out, the rest are for training. Its servers start with the
    first sample and end with `close`.
    """

    def __init__(
        self, name: str, args: Mapping[str, Any], limits: TurnLimits, *, train_size: int | None, eval_size: int
    ) -> None:
        self._name, self._limits = name, limits
        self._env = load_verifiers(name, args)
        self._client = EngineClient()
        self._model = vf.ModelContext(model="penstock", client=vf.TrainClientConfig(base_url="http://penstock.invalid"))
        self._prompts = read_tasks(self._env.taskset, train_size, eval_size)
        self._server: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()

    @property
    def name(self) -> str:
        return f"verifiers:{self._name}"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[split]

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Play one episode. Starting verifiers' servers is not counted as the environment's time."""
        if self._server is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(self._serve(self._ready))
        assert self._ready is not None
        await asyncio.shield(self._ready)
        return await self._limits.play(self._play, prompt, handle, self.name)

    async def close(self) -> None:
        """End verifiers' servers; a second call is a no-op."""
        self._stop.set()
        if self._server is not None:
            await self._server

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(_START_SECONDS) as start, self._env.serving():
                start.reschedule(None)
                # The server makes one client per endpoint configuration and looks here for it first.
                self._env._interception.clients[self._model.client.model_dump_json()] = self._client
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - reported to every waiting sample
            if not ready.done():
                late = start.expired() and isinstance(error, TimeoutError)
                why = f"did not start within {_START_SECONDS} s" if late else f"could not start: {_named(error)}"
                ready.set_exception(EnvironmentFailure(f"{self.name}: its servers {why}"))

    async def _play(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        sample = Sample(handle)

        def minted(trace: Any) -> None:
            sample.talks[trace.id] = Conversation(handle)
            self._client.samples[trace.id] = sample

        [slot] = self._env.slots(prompt.facts["task"])
        try:
            episode = await self._env.run_slot(slot, self._model, on_trace=minted)
        finally:
            for trace_id in sample.talks:
                del self._client.samples[trace_id]
        if sample.failure is not None:
            raise sample.failure
        trace = _trained_trace(episode, self.name)
        reward, talk = _reward(trace, self.name), sample.talks[trace.id]
        return replace(_trajectory(talk, reward, sample.out_of_room), **_numbers(trace, talk))


def _trained_trace(episode: Any, name: str) -> Any:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            said = told_by_others(errors[-1].type, errors[-1].message, errors[-1].traceback)
            raise raised_by_user(f"{name}: the episode failed: its code", said)
        raise EnvironmentFailure(f"{name}: the episode failed: no reason given")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise EnvironmentFailure(
            f"{name}: an episode has {len(traces)} trainable agents; Penstock trains one per sample. An environment "
            "marks others with `agents.<role>.trainable = False` in its setup()"
        )
    return traces[0]


def _reward(trace: Any, name: str) -> float:
    missing = [reward for reward, value in trace.rewards.items() if value is None]
    if missing or not trace.rewards:
        why = f"{', '.join(missing)} not scored" if missing else "its task has no @reward"
        raise EnvironmentFailure(f"{name}: there is no reward: {why} (stopped by {trace.stop_condition})")
    return float(trace.reward)


def _numbers(trace: Any, talk: Conversation) -> dict[str, Any]:
    """What verifiers has by name: rewards, without their weights, and metrics; turns and calls are counted here."""
    components = {name: float(reward.score) for name, reward in trace.rewards.items()}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    counts = {"turns": float(talk.generations), "tool_calls": float(talk.tool_calls)}
    return {"components": components, "metrics": counts | metrics}


def _trajectory(talk: Conversation, reward: float, out_of_room: bool) -> Trajectory:
    talk.drop_reply()
    first = next((i for i, message in enumerate(talk.messages) if message["role"] == "assistant"), 0)
    text = "\n".join(str(message.get("content") or "") for message in talk.messages[first:])
    return Trajectory(tuple(talk.segments), reward, text, out_of_room)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
