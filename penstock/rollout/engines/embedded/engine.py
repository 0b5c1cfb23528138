"""The asynchronous interface of the embedded engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal

import torch

from penstock.config.sections.model import ModelConfig
from penstock.errors import EngineError, SetupError
from penstock.rollout.engines.base import EngineHealth, EngineStats, GenerationRequest, GenerationResult
from penstock.rollout.engines.embedded import weight_update
from penstock.rollout.engines.embedded.choice import Decoding, make_scheduler
from penstock.rollout.engines.embedded.incoming import IncomingWeights, close_aside
from penstock.rollout.engines.embedded.requests import InvalidRequest, Ticket, check_request
from penstock.rollout.engines.embedded.runner import threads_for_step
from penstock.rollout.engines.embedded.worker import Phase, Worker
from penstock.rollout.engines.stop_strings import StopWatch, TokenTexts, stop_watch
from penstock.runtime.cpu import computing_with
from penstock.weights.digest import tensor_digests
from penstock.weights.hf import load_model, pick_device, silence_progress_bars
from penstock.weights.lora import attach_lora, merge_lora
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.transports.base import OpenWeights

_HEALTH = {
    Phase.RUNNING: EngineHealth.HEALTHY,
    Phase.PAUSED: EngineHealth.PAUSED,
    Phase.FAILED: EngineHealth.FAILED,
    Phase.CLOSED: EngineHealth.CLOSED,
}


class Residency(Enum):
    """What is in memory. AWAKE -> KV_FREED -> WEIGHTS_FREED by `sleep`; `wake` leads back, from WEIGHTS_FREED only to
    WEIGHTS_UNSET, and new weights from there to AWAKE. An engine that awaits weights begins as WEIGHTS_UNSET."""

    AWAKE = "awake"
    KV_FREED = "asleep (level 1)"
    WEIGHTS_FREED = "asleep (level 2)"
    WEIGHTS_UNSET = "awake, but without weights until it gets new ones"


class EmbeddedEngine:
    """A `GenerationEngine` on one Hugging Face causal LM in this process.

    The model's weights are the engine's own: an update overwrites them in place, and the model must not be used
    elsewhere meanwhile. All tensor work happens in one thread; the methods may be called from any event loop.

    Requests wait, in order, while all `max_num_seqs` slots are taken or the engine is paused. `kv_cache` says what an
    update does to running requests: `"keep"` continues with the keys and values of the old weights, `"recompute"`
    computes them again. `deterministic` makes tokens and log-probs bit-equal regardless of what else is running, at the
    price of fixed shapes; for the same bits everywhere, engines need the same `threads`. That is the engine's number of
    CPU threads; 0 leaves it to the engine: one if it is deterministic or a decode step is too small to gain from more,
    else torch's count. `decoding` says how tokens are computed (see
    `choice.Decoding`). `texts` provides the token texts in which stop strings are searched; it is called once, in the
    engine's thread, when a request first has any. With `awaits_weights` the model's own weights are never served: a
    trainer publishes the first version, as it does all later ones.

    Worked example, 2 slots: three `generate` calls; two run, one waits. `await pause()` returns at a token boundary,
    say after 5 tokens each. `await update_weights(publication)` with version 1, `await resume()`. The running ones end
    with `token_versions` (0, 0, 0, 0, 0, 1, 1, ...), the third is all 1. To pause for less time, `await
    prepare(publication)` before the pause, and `await apply(publication)` within it.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_num_seqs: int,
        max_model_len: int,
        name: str = "embedded",
        version: int = 0,
        deterministic: bool = False,
        kv_cache: Literal["keep", "recompute"] = "keep",
        threads: int = 0,
        decoding: Decoding = "auto",
        texts: Callable[[], TokenTexts] | None = None,
        awaits_weights: bool = False,
    ) -> None:
        if max_num_seqs < 1 or max_model_len < 2:
            raise SetupError(
                f"engine {name}: needs rollout.engine.max_num_seqs >= 1 (not {max_num_seqs}) and "
                f"rollout.engine.max_model_len >= 2 (not {max_model_len})"
            )
        if kv_cache not in ("keep", "recompute"):
            raise SetupError(f"engine {name}: kv_cache is 'keep' or 'recompute', not {kv_cache!r}")
        if threads < 0:
            raise SetupError(f"engine {name}: threads must be at least 0, not {threads}")
        self._name, self._recompute = name, kv_cache == "recompute"
        threads = threads or threads_for_step(model, max_num_seqs, deterministic=deterministic)
        # What it tries out here must hold for what its thread computes later.
        with torch.inference_mode(), computing_with(threads):
            model.eval()
            self._scheduler = make_scheduler(
                model,
                name=name,
                slots=max_num_seqs,
                max_model_len=max_model_len,
                deterministic=deterministic,
                version=version,
                decoding=decoding,
            )
        self._runner = self._scheduler.runner
        self._texts = None if texts is None else cache(texts)
        self._tickets: dict[str, Ticket] = {}
        self._residency = Residency.WEIGHTS_UNSET if awaits_weights else Residency.AWAKE
        self._weight_shapes: list[torch.Size] = []
        self._incoming = IncomingWeights(name, model, self._runner.device)
        self._worker = Worker(name, self._scheduler, threads)

    @classmethod
    def from_pretrained(
        cls,
        model: str | ModelConfig,
        *,
        device: str = "auto",
        max_num_seqs: int = 64,
        max_model_len: int = 512,
        name: str = "embedded",
        **options: Any,
    ) -> EmbeddedEngine:
        """An engine with its own weights, loaded from a model folder or hub id.

        `max_num_seqs` requests decode at the same time, each with up to `max_model_len` tokens of prompt and response.
        `device` is `auto`, `cpu` or `cuda`. `options` are those of the constructor, such as `kv_cache`.
        """
        config = ModelConfig(path=model) if isinstance(model, str) else model
        silence_progress_bars()
        loaded = load_model(config, pick_device(device))
        if config.lora is not None and config.lora.path is not None and not options.get("awaits_weights"):
            loaded = merge_lora(attach_lora(loaded, config.lora))
        return cls(loaded, max_num_seqs=max_num_seqs, max_model_len=max_model_len, name=name, **options)

    @property
    def name(self) -> str:
        """For messages."""
        return self._name

    @property
    def site(self) -> WeightSite:
        """Where its weights live."""
        return self._incoming.site

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate one response; waits while the slots are taken or the engine is paused."""
        check_request(request, self._runner.max_model_len, self._runner.vocabulary)
        if self._residency is not Residency.AWAKE and self._worker.phase in (Phase.RUNNING, Phase.PAUSED):
            raise EngineError(f"engine {self._name} cannot generate: it is {self._residency.value}")
        if request.request_id in self._tickets:
            raise InvalidRequest(f"request {request.request_id}: a request with this id is already in the engine")
        ticket = Ticket(request, asyncio.get_running_loop().create_future(), new_watch=self._new_watch(request))
        self._worker.submit(ticket)
        self._tickets[request.request_id] = ticket
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._worker.discard(ticket)
            raise
        finally:
            del self._tickets[request.request_id]

    def _new_watch(self, request: GenerationRequest) -> Callable[[], StopWatch] | None:
        stops, texts = request.sampling.stop, self._texts
        if not stops:
            return None
        if texts is None:
            raise InvalidRequest(
                f"request {request.request_id}: engine {self._name} was made without a tokenizer, which it needs for "
                "stop strings"
            )
        return lambda: stop_watch(texts(), stops)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now: their `generate` calls raise `RequestAborted`. Unknown ids are ignored."""
        tickets = [self._tickets[one] for one in request_ids if one in self._tickets]
        if tickets:
            with contextlib.suppress(EngineError):  # an engine that is gone has no requests left to end
                await self._worker.abort(tickets)

    async def preempt(self) -> None:
        """Give all requests back at a token boundary: each `generate` call returns what it has so far."""
        await self._worker.preempt()

    async def pause(self) -> None:
        """Returns once the engine is at a token boundary; running requests keep their place."""
        await self._worker.pause()

    async def resume(self) -> None:
        """Continue generating."""
        await self._worker.resume()

    async def prepare(self, publication: WeightPublication) -> None:
        """Check that published weights fit, and bring them as close as there is room for; it serves meanwhile.

        A publication that does not fit, or is no longer there, raises `WeightSyncError` and changes nothing.
        """
        if self._worker.phase in (Phase.FAILED, Phase.CLOSED):
            raise self._worker.gone()
        await self._incoming.prepare(publication)

    async def apply(self, publication: WeightPublication) -> None:
        """Copy the weights that were prepared, then take over their version; only while paused.

        A failure while copying leaves weights of two versions mixed, so the engine then counts as failed.
        """
        if self._worker.phase is Phase.RUNNING:
            raise EngineError(f"engine {self._name}: weights change only in a paused engine; call pause() first")
        if self._residency is Residency.WEIGHTS_FREED:
            raise EngineError(f"engine {self._name} is {self._residency.value}: call wake() before new weights")
        weights = self._incoming.take(publication)
        await self._worker.call(lambda: self._take_over(publication.version, weights), fatal=True)

    async def update_weights(self, publication: WeightPublication) -> None:
        """`prepare` and `apply` in one call; only while paused."""
        if self._worker.phase is Phase.RUNNING:
            raise EngineError(f"engine {self._name}: update_weights needs a paused engine; call pause() first")
        await self.prepare(publication)
        await self.apply(publication)

    async def weight_digests(self) -> dict[str, str]:
        """A hash of every weight that it serves (see `tensor_digests`), tied ones once, taken at a token boundary."""
        return await self._worker.call(lambda: tensor_digests(self._runner.lm.model.named_parameters()))

    async def sleep(self, level: int = 1) -> None:
        """Free the key-value cache (level 1) and the weights too (level 2); refused while it has requests."""
        if level not in (1, 2):
            raise EngineError(f"engine {self._name}: sleep levels are 1 and 2, not {level}")
        if self._tickets:
            raise EngineError(
                f"engine {self._name} cannot sleep: {len(self._tickets)} requests are in it; abort or await them first"
            )
        without_weights = level == 2 or self._residency in (Residency.WEIGHTS_FREED, Residency.WEIGHTS_UNSET)
        # Closes the door at once; `_free` says it again in its turn, should a `wake` still be in the inbox before it.
        self._residency = Residency.WEIGHTS_FREED if without_weights else Residency.KV_FREED
        await self._worker.call(lambda: self._free(without_weights), fatal=True)

    async def wake(self) -> None:
        """Take the memory again; after level 2 the engine serves only once it has new weights."""
        await self._worker.call(self._restore)

    def stats(self) -> EngineStats:
        """Counters since the start."""
        counters, running = self._scheduler.counters, self._scheduler.rows.count
        return EngineStats(
            running=running,
            waiting=max(0, len(self._tickets) - running),
            slots=self._runner.slots,
            tokens_generated=counters.tokens,
            busy_seconds=counters.busy_seconds,
            slot_seconds=counters.slot_seconds,
            version=self._scheduler.version,
            step_seconds=self._worker.step_seconds,
            extra={
                "decode_steps": counters.decode_steps,
                "prefills": counters.prefills,
                "prefill_tokens": counters.prefill_tokens,
                "shared_prefills": counters.shared_prefills,
                "recomputed": counters.recomputed,
            },
        )

    def health(self) -> EngineHealth:
        """A sleeping engine counts as paused."""
        health = _HEALTH[self._worker.phase]
        if health is EngineHealth.HEALTHY and self._residency is not Residency.AWAKE:
            return EngineHealth.PAUSED
        return health

    def when_lost(self, call: Callable[[EngineError], None]) -> None:
        """Call this with the cause when the engine's thread has failed; at once if it already has."""
        self._worker.when_failed(call)

    async def close(self) -> None:
        """Abort running requests, end the thread and let go of the model; a second call is a no-op."""
        self._incoming.close()
        await self._worker.close()

    # In the worker's thread

    def _take_over(self, version: int, weights: OpenWeights) -> None:
        try:
            weight_update.copy_weights(self._runner.lm.model, weights.tensors())
        finally:
            close_aside(weights)
        self._scheduler.weights_changed(version, self._recompute)
        if self._residency is Residency.WEIGHTS_UNSET:
            self._residency = Residency.AWAKE

    def _free(self, weights: bool) -> None:
        self._residency = Residency.WEIGHTS_FREED if weights else Residency.KV_FREED
        self._scheduler.free()
        if weights and not self._weight_shapes:
            self._scheduler.release_weights()
            self._weight_shapes = weight_update.free_weights(self._runner.lm.model.parameters())

    def _restore(self) -> None:
        if self._residency not in (Residency.KV_FREED, Residency.WEIGHTS_FREED):
            return
        freed = self._residency is Residency.WEIGHTS_FREED
        if self._weight_shapes:
            weight_update.restore_weights(self._runner.lm.model.parameters(), self._weight_shapes)
            self._weight_shapes = []
            self._scheduler.attach_weights()
        self._scheduler.restore()
        self._residency = Residency.WEIGHTS_UNSET if freed else Residency.AWAKE
