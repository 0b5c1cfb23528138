"""What streaming a train step costs, and that it changes nothing: time, gradients, memory of the log-probs.

`python benchmarks/split_step.py [--quick]` prints a table; the last line is one JSON object.

- Time: one step in k chunks over the same microbatches in one call, CPU time of the whole process, pairs interleaved
  in alternating order, median of the pairs' ratios. Chunks and limits are such that both do exactly the same passes.
  With the model's own layers, and with the lean ones that small models take on a CPU: a shorter step, on which the same
  chunks weigh more.
- Gradients: largest relative difference (2-norm over all parameters) between partitions, over both batchings, both loss
  levels and both kinds of layers, k = 1, 2 and one chunk per group.
- Memory: peak resident memory of one forward and backward of the chunked log-probs over that of the plain
  log-softmax, each in a process of its own, less what the process held before (Linux only).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig, PpoClipLoss
from penstock.config.sections.training import OptimizerConfig, TrainingConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.fields import (
    ADVANTAGE,
    GENERATION_LOGPROBS,
    INPUT_IDS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOKEN_VERSIONS,
    TRAIN_FIELDS,
    sample_id,
    schema,
)
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.logprobs import selected_logprobs
from penstock.training.workers.local import LocalTrainer

PARTITION = "bench"
GROUPS, SAMPLES, LENGTH, VOCABULARY = 8, 8, 40, 128
MEMORY_VOCABULARY, MEMORY_HIDDEN = 151_936, 32
CHUNK_TOKENS = TrainingConfig.model_fields["logprob_chunk_tokens"].default


def model(dtype: torch.dtype) -> Any:
    """A small Qwen3, about the size that the demo trains."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def put_groups(plane: MemoryDataPlane, *, ragged: bool) -> list[KVBatchMeta]:
    """Random groups; rows are equally long unless `ragged`."""
    rng = torch.Generator().manual_seed(0)
    plane.register_partition(PARTITION, schema(*TRAIN_FIELDS))
    metas = []
    for group in range(GROUPS):
        spread = torch.randint(-24, 1, (SAMPLES,), generator=rng).tolist() if ragged else [0] * SAMPLES
        lengths = [LENGTH + less for less in spread]
        masks = [(torch.arange(length) >= 12).float() for length in lengths]
        ids = [sample_id(f"p{group}", index) for index in range(SAMPLES)]
        columns = {
            INPUT_IDS: [torch.randint(VOCABULARY, (length,), generator=rng) for length in lengths],
            TOKEN_MASK: masks,
            GENERATION_LOGPROBS: [-5 * mask for mask in masks],
            TOKEN_VERSIONS: [torch.zeros(length, dtype=torch.int32) for length in lengths],
        }
        fields: dict[str, Any] = {name: JaggedColumn.from_rows(rows) for name, rows in columns.items()}
        fields |= {ADVANTAGE: torch.randn(SAMPLES, generator=rng), SAMPLE_MASK: torch.ones(SAMPLES)}
        plane.put_samples(ids, fields, PARTITION)
        metas.append(KVBatchMeta(PARTITION, tuple(ids), frozenset(TRAIN_FIELDS), tuple(lengths)))
    return metas


def in_chunks(metas: Sequence[KVBatchMeta], k: int) -> list[KVBatchMeta]:
    """The groups in k chunks."""
    bounds = [round(i * len(metas) / k) for i in range(k + 1)]
    return [KVBatchMeta.concat(metas[start:stop]) for start, stop in pairwise(bounds)]


def make_trainer(network: Any, plane: MemoryDataPlane, *, aggregation: str, batching: str, lean: bool) -> LocalTrainer:
    """A trainer whose microbatches hold one group of full length; the lean layers are for padded rows in float32."""
    algorithm = AlgorithmConfig(loss=PpoClipLoss.model_validate({"aggregation": aggregation}))
    training = TrainingConfig.model_validate(
        {
            "batching": batching,
            "max_tokens_per_microbatch": SAMPLES * LENGTH,
            "optimizer": OptimizerConfig(lr=1e-6),
        }
    )
    longest_row = LENGTH if lean else None
    return LocalTrainer(network, plane, algorithm, training, temperature=1.0, threads=1, longest_row=longest_row)


async def time_ratios(pairs: int, *, lean: bool) -> tuple[list[float], float]:
    """Ratios of CPU time, streamed over whole, and the median CPU seconds of a whole step."""
    plane = MemoryDataPlane()
    metas = put_groups(plane, ragged=False)
    trainer = make_trainer(model(torch.float32), plane, aggregation="token_mean", batching="padded", lean=lean)
    plans = {"whole": in_chunks(metas, 1), "streamed": in_chunks(metas, GROUPS)}
    passes = set()
    step = 0

    async def cpu_seconds(name: str) -> float:
        nonlocal step
        step += 1
        before = time.process_time()
        # Queued, as the train pump does: the trainer carries calls out in call order.
        await asyncio.gather(
            trainer.begin_train_step(step), *(trainer.train_microbatch(step, chunk) for chunk in plans[name])
        )
        result = await trainer.finish_train_step(step)
        passes.add(result.metrics["microbatches"])
        return time.process_time() - before

    for _ in range(3):
        await cpu_seconds("whole")
        await cpu_seconds("streamed")
    ratios, wholes = [], []
    for pair in range(pairs):
        order = ("whole", "streamed") if pair % 2 else ("streamed", "whole")
        seconds = {name: await cpu_seconds(name) for name in order}
        ratios.append(seconds["streamed"] / seconds["whole"])
        wholes.append(seconds["whole"])
    await trainer.close()
    assert len(passes) == 1, "both forms must do the same passes"
    return ratios, statistics.median(wholes)


async def raw_gradients(dtype: torch.dtype, k: int, aggregation: str, batching: str, *, lean: bool) -> Tensor:
    """All gradients of one step, un-normalised, as one vector."""
    plane, network = MemoryDataPlane(), model(dtype)
    metas = put_groups(plane, ragged=True)
    trainer = make_trainer(network, plane, aggregation=aggregation, batching=batching, lean=lean)
    await trainer.begin_train_step(0)
    for chunk in in_chunks(metas, k):
        await trainer.train_microbatch(0, chunk)
    flat = torch.cat([parameter.grad.double().flatten() for parameter in network.parameters()])
    await trainer.abort_train_step(0)
    await trainer.close()
    return flat


async def gradient_difference(dtype: torch.dtype) -> float:
    """The largest relative difference to the whole batch."""
    worst = 0.0
    for aggregation in ("token_mean", "sequence_mean"):
        for batching, lean in (("padded", False), ("padded", True), ("packed", False)):
            whole = await raw_gradients(dtype, 1, aggregation, batching, lean=lean)
            for k in (2, GROUPS):
                other = await raw_gradients(dtype, k, aggregation, batching, lean=lean)
                worst = max(worst, float((whole - other).norm() / whole.norm()))
    return worst


def resident_bytes(entry: str) -> int:
    """`VmRSS`, the resident memory now, or `VmHWM`, its peak; unlike `ru_maxrss` not inherited from the parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(entry))


def measure_logprobs(kind: str, tokens: int) -> None:
    """Print the bytes by which one forward and backward raised this process's peak memory."""
    hidden_TH = torch.randn(tokens, MEMORY_HIDDEN, requires_grad=True)
    weight_VH = torch.randn(MEMORY_VOCABULARY, MEMORY_HIDDEN, requires_grad=True)
    targets_T = torch.randint(MEMORY_VOCABULARY, (tokens,))
    (hidden_TH[:8] @ weight_VH[:8].T).sum().backward()
    before = resident_bytes("VmRSS")
    if kind == "naive":
        logprobs_TV = torch.log_softmax(hidden_TH @ weight_VH.T, -1)
        logprobs_T = logprobs_TV.gather(1, targets_T[:, None])[:, 0]
    else:
        logprobs_T, _ = selected_logprobs(hidden_TH, weight_VH, targets_T, chunk_tokens=CHUNK_TOKENS)
    logprobs_T.sum().backward()
    print(resident_bytes("VmHWM") - before)


class LogprobMemory:
    """Peak extra memory of one (kind, tokens), measured in a process of its own that runs from construction on."""

    def __init__(self, kind: str, tokens: int) -> None:
        command = [sys.executable, __file__, "--measure", kind, "--tokens", str(tokens)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def gib(self) -> float:
        """Wait for the figure."""
        return int(self._process.communicate()[0]) / 2**30


def report(rows: Sequence[tuple[str, str, str]]) -> None:
    for name, value, bar in rows:
        print(f"{name:<58} {value:>12}   {bar}")


async def benchmark(quick: bool) -> dict[str, float]:
    pairs = 25 if quick else 101
    ratios, seconds = await time_ratios(pairs, lean=False)
    lean_ratios, lean_seconds = await time_ratios(pairs, lean=True)
    low, _, high = statistics.quantiles(ratios)
    # Only the times suffer from company; gradients and memory are measured side by side.
    naive, chunked = LogprobMemory("naive", 4096), LogprobMemory("chunked", 4096)
    found: dict[str, float] = {
        "streamed_over_whole": statistics.median(ratios),
        "streamed_over_whole_pairs": len(ratios),
        "streamed_over_whole_quartile_low": low,
        "streamed_over_whole_quartile_high": high,
        "whole_step_cpu_seconds": seconds,
        "streamed_over_whole_lean": statistics.median(lean_ratios),
        "whole_step_cpu_seconds_lean": lean_seconds,
        "grad_rel_diff": await gradient_difference(torch.float32),
        "grad_rel_diff_fp64": await gradient_difference(torch.float64),
        "logprob_memory_gib": chunked.gib(),
        "logprob_memory_naive_gib": naive.gib(),
    }
    found["logprob_memory_ratio"] = found["logprob_memory_gib"] / found["logprob_memory_naive_gib"]
    if not quick:
        found["logprob_memory_32k_gib"] = LogprobMemory("chunked", 32_768).gib()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pairs; under a minute")
    parser.add_argument("--measure", choices=["naive", "chunked"], help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=4096, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_logprobs(arguments.measure, arguments.tokens)
        return
    found = asyncio.run(benchmark(arguments.quick))
    report(
        [
            (
                f"streamed step, {GROUPS} chunks, over one call (CPU time)",
                f"{found['streamed_over_whole']:.4f}",
                "<= 1.03",
            ),
            (
                "  lower and upper quartile of the pairs",
                f"{found['streamed_over_whole_quartile_low']:.3f}–{found['streamed_over_whole_quartile_high']:.3f}",
                "",
            ),
            ("  CPU seconds of a step in one call", f"{found['whole_step_cpu_seconds']:.3f}", ""),
            (
                "  the same with the lean layers; CPU seconds",
                f"{found['streamed_over_whole_lean']:.4f} / {found['whole_step_cpu_seconds_lean']:.3f}",
                "",
            ),
            ("gradients, largest relative difference, fp32", f"{found['grad_rel_diff']:.1e}", "<= 1e-6"),
            ("gradients, largest relative difference, fp64", f"{found['grad_rel_diff_fp64']:.1e}", "<= 1e-12"),
            (
                "log-probs, peak memory over plain log-softmax, 4,096 tokens",
                f"{found['logprob_memory_ratio']:.3f}",
                "<= 0.25",
            ),
            (
                "  GiB, chunked and plain",
                f"{found['logprob_memory_gib']:.2f} / {found['logprob_memory_naive_gib']:.2f}",
                "",
            ),
        ]
        + (
            [("  GiB, chunked, 32,768 tokens", f"{found['logprob_memory_32k_gib']:.2f}", "")]
            if not arguments.quick
            else []
        )
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
