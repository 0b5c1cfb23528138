"""Tokens per second of the embedded engine on one GPU, next to transformers' `generate` and vLLM.

A Qwen3-0.6B shape with random weights in bf16; prompts of 64 to 128 tokens, 256 new tokens each, sampled, without a
stop token. Everyone gets the same prompts. The embedded engine is measured with its kernels and CUDA graphs and on its
plain path; it returns log-probs, and so does vLLM; `generate` is not asked for any. vLLM runs in a process of its own
(it takes minutes to start, so only with --vllm). Everyone is warmed up; passes of the engine and vLLM take turns.

A decode step must read all weights and, for every request, the keys and values of its context: that over the memory
bandwidth is the bound which the shares refer to. `device` times are CUDA events around steps enqueued back to back at
the mean context; `wall` times are a pass's decode time per step as the engine's user sees it, prefills included.

    python benchmarks/engine_gpu.py            # medians of 3 passes
    python benchmarks/engine_gpu.py --vllm     # with vLLM, where it is installed
    python benchmarks/engine_gpu.py --quick    # 64 requests, one pass
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers as hf

from penstock.rollout.engines.base import GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.embedded.choice import Decoding, make_scheduler

DEVICE = "cuda"
PROMPT_TOKENS = (64, 128)
NEW_TOKENS = 256
CONTEXT = PROMPT_TOKENS[1] + NEW_TOKENS
VOCABULARY = 151_936
LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128
_MARK = "@@ "
"""Begins the lines by which the process with vLLM answers; it prints much else."""

Prompts = list[tuple[int, ...]]
_WARM_TOKENS = 8
"""New tokens of the pass that warms up a slow way."""


def make_model() -> Any:
    """The same random weights every time."""
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device(DEVICE):
        model = hf.Qwen3ForCausalLM(config)
    for parameter in model.parameters():  # not the rotary frequencies, which stay in float32 as in a loaded model
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def make_prompts(requests: int, seed: int) -> Prompts:
    """Random tokens, the same for a seed."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.randint(*PROMPT_TOKENS))) for _ in range(requests)]


class Embedded:
    """The embedded engine; keeps the last pass's results."""

    def __init__(self, prompts: Prompts, decoding: Decoding) -> None:
        model, start = make_model(), time.perf_counter()
        self._engine = EmbeddedEngine(model, max_num_seqs=len(prompts), max_model_len=CONTEXT, decoding=decoding)
        self.start_seconds = time.perf_counter() - start
        self._prompts, self._passes = prompts, itertools.count(1)
        self._runner = asyncio.Runner()
        self.asked: list[GenerationRequest] = []
        self.results: list[GenerationResult] = []

    def run(self, new_tokens: int = NEW_TOKENS) -> int:
        """All requests at once; new prompts in every pass, so that no prefill comes from the last one."""
        first = next(self._passes)
        self.asked = [
            GenerationRequest(f"r{i}", (first, *prompt[1:]), SamplingParams(max_new_tokens=new_tokens), seed=i)
            for i, prompt in enumerate(self._prompts)
        ]
        self.results = self._runner.run(self._generate())
        return sum(len(result.token_ids) for result in self.results)

    async def _generate(self) -> list[GenerationResult]:
        return list(await asyncio.gather(*map(self._engine.generate, self.asked)))

    def close(self) -> None:
        """End the engine."""
        self._runner.run(self._engine.close())
        self._runner.close()


def generate_pass(prompts: Prompts) -> Callable[..., int]:
    """`model.generate` on one left-padded batch."""
    model = make_model()
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    ids, mask = ids.to(DEVICE), mask.to(DEVICE)

    def run(new_tokens: int = NEW_TOKENS) -> int:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=True, top_k=0, pad_token_id=0
        )
        torch.cuda.synchronize()
        return (out.shape[1] - longest) * len(prompts)

    return run


# vLLM, in a process of its own


def serve_vllm(folder: str, seed: int) -> None:
    """Answer each line `requests` on standard input with the seconds and tokens of one pass."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    llm = LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.4)
    print(_MARK + "{}", flush=True)
    params = VllmParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    for turn, line in enumerate(sys.stdin):
        prompts = [{"prompt_token_ids": [turn + 1, *prompt[1:]]} for prompt in make_prompts(int(line), seed)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(_MARK + json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


class Vllm:
    """The process with vLLM, and the passes it is asked for."""

    def __init__(self, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        make_model().save_pretrained(self._folder.name)
        torch.cuda.empty_cache()
        start = time.perf_counter()
        command = [sys.executable, __file__, "--serve-vllm", self._folder.name, "--seed", str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        self.start_seconds = time.perf_counter() - start

    def rate(self, requests: int) -> float:
        """Tokens per second of one pass."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{requests}\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["tokens"] / answer["seconds"])

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return dict(json.loads(line.removeprefix(_MARK)))
        raise RuntimeError("its process has ended; see its messages above")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._folder.cleanup()


def _start_vllm(seed: int) -> Vllm | None:
    """None where it does not start: the others are measured all the same."""
    try:
        return Vllm(seed)
    except (RuntimeError, OSError) as error:
        print(f"vLLM: not measured: {error}", flush=True)
        return None


# What a step costs


def bytes_per_step(model: Any, requests: int, context: float) -> float:
    """What a decode step must read: all weights once, and each request's keys and values."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return weights + requests * context * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2


def device_times(prompts: Prompts, profile: bool) -> dict[str, float]:
    """Milliseconds of one decode step at the mean context, and of the prefill of all prompts, by CUDA events."""
    model = make_model()
    with torch.inference_mode():
        return _device_times(model, prompts, profile)


def _device_times(model: Any, prompts: Prompts, profile: bool) -> dict[str, float]:
    rows = len(prompts)
    scheduler: Any = make_scheduler(
        model, name="times", slots=rows, max_model_len=CONTEXT, deterministic=False, version=0, decoding="auto"
    )
    decoder, slots_B = scheduler.decoder, np.arange(rows, dtype=np.int32)
    prefill_ms = _timed(lambda: decoder.prefill([prompt[:-1] for prompt in prompts], slots_B.tolist()), 3)
    feed_2B = np.stack((slots_B, [min(len(prompt) + NEW_TOKENS // 2, CONTEXT) - 10 for prompt in prompts]))
    decoder.seat(slots_B, feed_2B.astype(np.int64), np.ones(rows, np.float32), np.arange(rows))
    decoder.launch(slots_B).wait()
    step_ms = _timed(lambda: decoder.launch(slots_B), 20)
    if profile:
        _profile(lambda: decoder.launch(slots_B))
    bytes_read = bytes_per_step(model, rows, mean_context(prompts))
    scheduler.free()
    return {"prefill_ms": prefill_ms, "step_device_ms": step_ms, "gb_per_step": bytes_read / 1e9}


def mean_context(prompts: Prompts) -> float:
    """Tokens that a request's decode steps attend to, on average."""
    return sum(map(len, prompts)) / len(prompts) + NEW_TOKENS / 2


def _timed(function: Callable[[], object], repeats: int) -> float:
    function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def _profile(function: Callable[[], object], steps: int = 4) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with recording(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            function()
        torch.cuda.synchronize()
    print(f"kernels of {steps} decode steps:")
    for event in sorted(profiler.key_averages(), key=lambda one: -one.device_time_total)[:14]:
        share = f"{event.device_time_total / steps / 1000:8.3f} ms a step, {event.count / steps:6.1f} calls"
        print(f"  {share}  {event.key[:90]}")


@torch.no_grad()
def agreement(asked: list[GenerationRequest], results: list[GenerationResult], rows: int = 64) -> dict[str, float]:
    """The engine's log-probs against one forward of the Hugging Face model over prompt and response, both in bf16."""
    model, differences = make_model(), []
    for request, result in list(zip(asked, results, strict=True))[:rows]:
        ids = torch.tensor([request.prompt_ids + result.token_ids], device=DEVICE)
        first = len(request.prompt_ids) - 1
        logprobs_TV = model(ids).logits[0, first:-1].float().log_softmax(-1)
        tokens_T1 = torch.tensor(result.token_ids, device=DEVICE)[:, None]
        found_T = torch.tensor(result.logprobs, device=DEVICE)
        differences.append(found_T - logprobs_TV.gather(1, tokens_T1)[:, 0])
    difference = torch.cat(differences)
    return {"mean_abs": float(difference.abs().mean()), "mean_signed": float(difference.mean())}


def measure(requests: int, options: argparse.Namespace, vllm: Vllm | None) -> dict[str, Any]:
    """All ways at one number of requests. The engine's and vLLM's passes take turns; the slow ways have one each."""
    prompts = make_prompts(requests, options.seed)
    figures: dict[str, Any] = device_times(prompts, options.profile)
    figures |= _fast_ways(prompts, options.passes, vllm)
    bound_ms = figures["gb_per_step"] * 1e9 / options.bandwidth * 1e3
    wall_ms = requests / figures["embedded_tok_s"] * 1e3
    figures |= {
        "step_wall_ms": wall_ms,
        "bound_ms": bound_ms,
        "device_share_of_bound": bound_ms / figures["step_device_ms"],
        "wall_share_of_bound": bound_ms / wall_ms,
    }
    print(json.dumps(_rounded(figures)), flush=True)
    if not options.only_embedded:
        figures |= _slow_ways(prompts)
    for other in ("embedded_plain", "generate", "vllm"):
        if f"{other}_tok_s" in figures:
            figures[f"over_{other}"] = figures["embedded_tok_s"] / figures[f"{other}_tok_s"]
    return figures


def _fast_ways(prompts: Prompts, passes: int, vllm: Vllm | None) -> dict[str, Any]:
    embedded = Embedded(prompts, "auto")
    ways: dict[str, Callable[[], float]] = {"embedded": lambda: _rate(embedded.run)}
    if vllm is not None:
        ways["vllm"] = lambda: vllm.rate(len(prompts))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + passes):
        for name, way in ways.items():
            rate = way()
            print(f"  {len(prompts)} requests, pass {turn}: {name} {rate:,.0f} tok/s", flush=True)
            if turn:
                rates[name].append(rate)
    figures: dict[str, Any] = {f"{name}_tok_s": round(statistics.median(values), 1) for name, values in rates.items()}
    figures["engine_start_s"] = embedded.start_seconds
    figures["agreement"] = agreement(embedded.asked, embedded.results)
    embedded.close()
    return figures


def _slow_ways(prompts: Prompts) -> dict[str, float]:
    figures = {}
    plain = Embedded(prompts, "plain")
    plain.run(_WARM_TOKENS)
    figures["embedded_plain_tok_s"] = round(_rate(plain.run), 1)
    plain.close()
    generate = generate_pass(prompts)
    generate(_WARM_TOKENS)
    figures["generate_tok_s"] = round(_rate(generate), 1)
    print(f"  {len(prompts)} requests: {figures}", flush=True)
    return figures


def _rate(run: Callable[..., int]) -> float:
    start = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - start)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) and abs(value) < 1e4 else value


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{inner}", one) for inner, one in value.items())
        else:
            yield key, value


def main() -> None:
    """Measure, print a table, and the figures as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 requests, one pass")
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second that the memory gives")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too; it takes minutes to start")
    parser.add_argument("--only-embedded", action="store_true", help="no plain path, no generate")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a decode step")
    parser.add_argument("--serve-vllm", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_vllm:
        return serve_vllm(options.serve_vllm, options.seed)
    if not torch.cuda.is_available():
        print("needs a CUDA GPU, and torch sees none: nothing was measured")
        print("{}")
        return None
    logging.disable(logging.INFO)
    if options.quick:
        options.requests, options.passes = [64], 1
    vllm = _start_vllm(options.seed) if options.vllm else None
    found = {str(requests): _rounded(measure(requests, options, vllm)) for requests in options.requests}
    if vllm is not None:
        print(f"vLLM started in {vllm.start_seconds:.0f} s")
        vllm.close()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {hf.__version__}")
    keys = [key for key, _ in _rows(next(iter(found.values())))]
    print(f"{'':<28}" + "".join(f"{requests + ' requests':>16}" for requests in found))
    for key in keys:
        print(f"{key:<28}" + "".join(f"{dict(_rows(figures)).get(key, ''):>16}" for figures in found.values()))
    print(json.dumps(found))
    return None


if __name__ == "__main__":
    main()
