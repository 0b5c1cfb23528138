"""Tokens per second of the embedded engine, next to transformers' own ways of generating and, if installed, vLLM.

Everyone gets the same model and the same requests: mixed prompt lengths and mixed response lengths, sampled, without a
stop token, so that all generate the same number of tokens. Only tokens that were asked for count. `generate` is
measured in its best of several ways: one left-padded batch, and batches of requests of similar length. On a CPU both of
transformers' ways are measured with one thread and with all of them, and the better counts; the embedded engine chooses
for itself. Starting up is not counted, everyone is warmed up, and the measured passes take turns, so that a busy
machine hits all alike.

    python benchmarks/engine.py            # medians of 7 passes
    python benchmarks/engine.py --quick    # under a minute
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

from penstock.rollout.engines.base import GenerationRequest, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine

PROMPT_TOKENS = (8, 48)
NEW_TOKENS = (8, 128)
CONTEXT = PROMPT_TOKENS[1] + NEW_TOKENS[1]
VOCABULARY = 1000

Pass = Callable[[], int]
"""Generates everything once; gives the number of tokens that were asked for and generated."""


@dataclass(frozen=True)
class Workload:
    """The requests, in the order of their arrival."""

    prompts: list[tuple[int, ...]]
    new_tokens: list[int]


def make_model(device: str) -> Any:
    """A randomly initialised Qwen3 of about a million parameters."""
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return hf.Qwen3ForCausalLM(config).eval().to(device)


def make_workload(requests: int, seed: int) -> Workload:
    """Mixed lengths, the same for a seed."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.randint(*PROMPT_TOKENS))) for _ in range(requests)]
    return Workload(prompts, [rng.randint(*NEW_TOKENS) for _ in range(requests)])


@contextlib.contextmanager
def embedded(workload: Workload, device: str, slots: int) -> Iterator[Pass]:
    """All requests at once into the engine; it returns log-probs too, which nobody else is asked for."""
    engine = EmbeddedEngine(make_model(device), max_num_seqs=slots, max_model_len=CONTEXT)
    passes = itertools.count(1)

    async def generate_all() -> int:
        first = next(passes) % VOCABULARY  # new prompts in every pass: their prefills must not come from the last one
        requests = [
            GenerationRequest(f"r{i}", (first, *prompt[1:]), SamplingParams(max_new_tokens=new), seed=i)
            for i, (prompt, new) in enumerate(zip(workload.prompts, workload.new_tokens, strict=True))
        ]
        results = await asyncio.gather(*map(engine.generate, requests))
        return sum(len(result.token_ids) for result in results)

    with asyncio.Runner() as runner:
        yield lambda: runner.run(generate_all())
        runner.run(engine.close())


@contextlib.contextmanager
def generate(workload: Workload, device: str, batches: int, threads: int) -> Iterator[Pass]:
    """`model.generate` on left-padded batches of requests sorted by response length, each run to its longest."""
    model = make_model(device)
    order = sorted(range(len(workload.prompts)), key=lambda i: workload.new_tokens[i])
    size = -(-len(order) // batches)

    def run() -> int:
        torch.set_num_threads(threads)
        useful = 0
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            longest = max(len(workload.prompts[i]) for i in chunk)
            ids = torch.zeros(len(chunk), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(chunk):
                ids[row, longest - len(workload.prompts[i]) :] = torch.tensor(workload.prompts[i])
                mask[row, longest - len(workload.prompts[i]) :] = 1
            new = max(workload.new_tokens[i] for i in chunk)
            out = model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=new,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
            assert out.shape[1] == longest + new
            useful += sum(workload.new_tokens[i] for i in chunk)
        return useful

    yield run


def _tell_memory_without_psutil() -> None:
    """transformers asks psutil for a CPU's memory, and takes it for zero where psutil is not installed."""
    from transformers.generation.continuous_batching import cache

    if importlib.util.find_spec("psutil") is None and not torch.cuda.is_available():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cache.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), total, 0, 0)


@contextlib.contextmanager
def generate_batch(workload: Workload, device: str, threads: int) -> Iterator[Pass]:
    """transformers' continuous batching (what `generate_batch` runs on), its manager kept between passes."""
    _tell_memory_without_psutil()
    torch.set_num_threads(threads)  # the manager's thread starts with what is set here
    model = make_model(device)
    settings = hf.ContinuousBatchingConfig(
        allow_block_sharing=False, page_size=32, num_blocks=8 * len(workload.prompts)
    )
    sampling = hf.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS[1], eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=settings
    ) as manager:

        def run() -> int:
            for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True):
                manager.add_request(list(prompt), max_new_tokens=new, eos_token_id=-1)
            tokens = finished = 0
            while finished < len(workload.prompts):
                result = manager.get_result(timeout=30)
                if result is None or result.error:
                    raise RuntimeError(f"generate_batch gave no result: {result and result.error}")
                if result.is_finished():
                    finished += 1
                    tokens += len(result.generated_tokens)
            return tokens

        yield run


@contextlib.contextmanager
def vllm(workload: Workload) -> Iterator[Pass]:
    """vLLM's offline engine on the same weights."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    with tempfile.TemporaryDirectory() as folder:
        make_model("cpu").save_pretrained(folder)
        llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=CONTEXT, dtype="float32")
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts]
        params = [
            VllmParams(max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False) for new in workload.new_tokens
        ]
        yield lambda: sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False))


def measure(ways: dict[str, Pass], expected: int, passes: int, warmups: int) -> dict[str, list[float]]:
    """Tokens per second of each pass of each way; the ways take turns."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warmups + passes):
        for name, run in ways.items():
            start = time.perf_counter()
            tokens = run()
            elapsed = time.perf_counter() - start
            assert tokens == expected, f"{name} generated {tokens} tokens instead of {expected}"
            if turn >= warmups:
                rates[name].append(tokens / elapsed)
    return rates


def main() -> None:
    """Measure, print a table, and the figures as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer passes, no vLLM")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--passes", type=int, default=0, help="measured passes (default 7; 3 with --quick)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    all_threads = torch.get_num_threads()
    thread_counts = sorted({1, all_threads}) if options.device == "cpu" else [all_threads]
    passes = options.passes or (3 if options.quick else 7)
    workload = make_workload(options.requests, options.seed)
    expected = sum(workload.new_tokens)
    print(f"{options.requests} requests, {expected} tokens to generate, {all_threads} CPU threads")
    with_vllm = not options.quick and importlib.util.find_spec("vllm") is not None
    if not with_vllm:
        print("vLLM: left out with --quick" if options.quick else "vLLM: not installed here, so not measured")
    with contextlib.ExitStack() as stack:
        ways = {"embedded": stack.enter_context(embedded(workload, options.device, options.slots))}
        for threads in thread_counts:
            for batches in (2,) if options.quick else (1, 2, 4):  # two is the best of them here
                ways[f"generate, {batches} batch(es), {threads} thread(s)"] = stack.enter_context(
                    generate(workload, options.device, batches, threads)
                )
            ways[f"generate_batch, {threads} thread(s)"] = stack.enter_context(
                generate_batch(workload, options.device, threads)
            )
        if with_vllm:
            ways["vllm"] = stack.enter_context(vllm(workload))
        rates = measure(ways, expected, passes, warmups=1)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{'way':<36}{'median tok/s':>14}{'min':>10}{'max':>10}")
    for name, values in rates.items():
        print(f"{name:<36}{medians[name]:>14.0f}{min(values):>10.0f}{max(values):>10.0f}")
    best_generate = max(value for name, value in medians.items() if name.startswith("generate,"))
    best_batch = max(value for name, value in medians.items() if name.startswith("generate_batch,"))
    figures = {
        "embedded_tok_s": round(medians["embedded"], 1),
        "generate_tok_s": round(best_generate, 1),
        "generate_batch_tok_s": round(best_batch, 1),
        "embedded_over_best": round(medians["embedded"] / max(best_generate, best_batch), 3),
        "vllm_tok_s": round(medians["vllm"], 1) if with_vllm else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
