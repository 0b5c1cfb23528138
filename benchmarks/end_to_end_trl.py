"""Samples per second and reward of whole GRPO runs: TRL's GRPOTrainer next to Penstock, on the CPU.

Both train the same Qwen3 (4 layers, 128 wide, random weights) on the same prompts in the same order with the same
reward: 8 prompts of 8 responses of up to 64 tokens a step, the same AdamW, temperature, advantages and token-level
loss. A prompt is a word, the reward the share of the response's letters that the word has: from scratch, it takes about
60 steps to learn. Responses end when the model says so, most of them long before the limit, as in practice. In the
second workload the model cannot end a response: all have 64 tokens, which leaves nothing to gain from their lengths.

TRL runs as it does without a server: `generate`, strictly on-policy, the batch in one piece; without gradient
checkpointing, bf16, logging and evaluation, which would slow it down. It is measured with one thread and with all
cores, and the better counts. Penstock runs as it is meant to, with generation one version ahead of training at most (a
window of 1, corrected by truncated importance sampling) and the engine in a process of its own: `ratio`. Strictly
on-policy, as TRL is, it is `ratio_on_policy`; there the two sides overlap only while a step's last responses are
generated. Every run is a process (or two) of its own; runs take turns, so that a busy machine hits all alike. Start-up
and the first step are not counted.

    python benchmarks/end_to_end_trl.py            # medians of 3 rounds
    python benchmarks/end_to_end_trl.py --quick    # under a minute
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROUPS, RESPONSES, NEW_TOKENS = 8, 8, 64
SAMPLES = GROUPS * RESPONSES
LETTERS = string.ascii_lowercase[:12]
WORD_LETTERS = (4, 12)
LEARNING_RATE = 5e-4
COLON, EOS = ":", "<eos>"
LIMIT_SECONDS = 600
"""Of one run: threads of TRL that spin can nearly stand still on a busy machine."""


def letters_reward(prompt: str, response: str, answer: str | None = None) -> float:
    """The share of the response's letters that the word has; 0 for an empty response."""
    word = set(prompt.removesuffix(COLON))
    return sum(letter in word for letter in response) / max(1, len(response))


def make_prompts(count: int, seed: int) -> list[str]:
    """Words of drawn letters, some more frequent than others."""
    rng = random.Random(seed)
    weights = [2 ** (-i / 6) for i in range(len(LETTERS))]
    return ["".join(rng.choices(LETTERS, weights, k=rng.randint(*WORD_LETTERS))) + COLON for _ in range(count)]


def save_model(folder: Path, *, can_end: bool) -> None:
    """A model with one token per letter. One that cannot end has no row for the last token, the end of sequence."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokens = [*LETTERS, COLON, EOS]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=COLON))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    pad = EOS if can_end else COLON
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=EOS, padding_side="left"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokens) - (not can_end),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokens.index(pad),
        eos_token_id=len(tokens) - 1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Outcome:
    """What one run measured, from the end of its first step to the end of its last."""

    seconds: float
    samples: int
    tokens: int
    """Generated tokens."""
    rewards: list[float]
    """Mean of each step, the first included."""

    @property
    def samples_s(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def end_reward(self) -> float:
        """Mean over the last quarter of the steps."""
        return statistics.mean(self.rewards[-max(1, len(self.rewards) // 4) :])


def outcome(step_ends: Sequence[float], rewards: Sequence[float], lengths: Sequence[float]) -> Outcome:
    """From the ends of all steps, and their means over samples."""
    steps = len(step_ends) - 1
    tokens = round(sum(lengths[1:]) * SAMPLES)
    return Outcome(step_ends[-1] - step_ends[0], steps * SAMPLES, tokens, list(rewards))


def run_trl(folder: Path, model: Path, prompts: list[str], seed: int, threads: int) -> Outcome:
    """A run of TRL's trainer, with what slows it down switched off."""
    import torch

    torch.set_num_threads(threads)
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bar()
    disable_progress_bars()
    step_ends: list[float] = []
    rewards: list[float] = []
    lengths: list[float] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = [letters_reward(*pair) for pair in zip(prompts, completions, strict=True)]
        rewards.append(statistics.mean(scores))
        lengths.append(statistics.mean(map(len, completion_ids)))
        return scores

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_ends.append(time.perf_counter())

    settings = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=SAMPLES,
        num_generations=RESPONSES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=len(prompts) // GROUPS,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    data = Dataset.from_dict({"prompt": prompts})
    GRPOTrainer(str(model), reward, args=settings, train_dataset=data, callbacks=[Clock()]).train()
    return outcome(step_ends, rewards, lengths)


def penstock_settings(folder: Path, model: Path, prompts: Path, seed: int) -> dict[str, Any]:
    """The settings of `run_trl`, in Penstock's words."""
    return {
        "run_dir": str(folder / "run"),
        "seed": seed,
        "model": {"path": str(model)},
        "data": {"train_path": str(prompts), "train_size": 10**6, "shuffle": False},
        "rollout": {
            "environment": {"kind": "function", "import_path": "end_to_end_trl:letters_reward"},
            "group_size": RESPONSES,
            "max_inflight_groups": 2 * GROUPS,
            "sampling": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0},
            "engine": {"max_num_seqs": SAMPLES, "max_model_len": WORD_LETTERS[1] + 1 + NEW_TOKENS},
        },
        "buffer": {"max_buffered_groups": 2 * GROUPS},
        "algorithm": {
            "loss": {"kind": "ppo_clip", "aggregation": "token_mean", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
        },
        "training": {
            "prompt_groups_per_step": GROUPS,
            "min_groups_per_chunk": GROUPS // 2,
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0, "max_grad_norm": 1.0},
        },
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"at_end": False},
        "runtime": {"engine_process": True},
        "observe": {"console": "off"},
    }


def run_penstock(folder: Path, model: Path, prompts: list[str], seed: int, overrides: Sequence[str]) -> Outcome:
    """A run of Penstock."""
    from penstock.runtime.cpu import let_idle_threads_sleep

    let_idle_threads_sleep()
    import penstock

    data, config = folder / "prompts.jsonl", folder / "config.yaml"
    data.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts), encoding="utf-8")
    config.write_text(json.dumps(penstock_settings(folder, model, data, seed)), encoding="utf-8")
    run_dir = penstock.train(penstock.load_config(config, overrides)).run_dir
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return outcome(
        [step["timing/elapsed_s"] for step in steps],
        [step["train/reward_mean"] for step in steps],
        [step["rollout/response_length_mean"] for step in steps],
    )


@dataclass(frozen=True)
class Contender:
    """Who runs, and how."""

    name: str
    trl_threads: int = 0
    """0 means Penstock."""
    overrides: tuple[str, ...] = ()

    def run(self, folder: Path, model: Path, steps: int, seed: int) -> Outcome:
        """A run in a process of its own."""
        command = [sys.executable, __file__, "--contender", self.name, "--folder", folder, "--model", model]
        command += ["--steps", steps, "--seed", seed]
        words = [str(part) for part in command]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{self.name} did not end within {LIMIT_SECONDS} s: the machine is too busy") from None
        if done.returncode:
            raise SystemExit(f"{self.name} failed:\n{done.stdout}{done.stderr}")
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))

    def run_here(self, folder: Path, model: Path, steps: int, seed: int) -> Outcome:
        """The run itself."""
        prompts = make_prompts(steps * GROUPS, seed)
        if self.trl_threads:
            return run_trl(folder, model, prompts, seed, self.trl_threads)
        return run_penstock(folder, model, prompts, seed, self.overrides)


CORES = len(os.sched_getaffinity(0))
ON_POLICY = Contender("penstock_on_policy")
WINDOW_1 = Contender(
    "penstock",
    overrides=("staleness.policy=windowed", "staleness.max_staleness=1", "algorithm.correction.kind=tis"),
)
TRL = [Contender(f"trl_{threads}_threads", trl_threads=threads) for threads in sorted({1, CORES})]
CONTENDERS = {contender.name: contender for contender in (*TRL, WINDOW_1, ON_POLICY)}


def measure(folder: Path, workload: str, steps: int, rounds: int, names: Sequence[str]) -> dict[str, list[Outcome]]:
    """All runs of a workload, turn by turn; every round has prompts and a seed of its own."""
    model = folder / workload
    save_model(model, can_end=workload == "words")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names:
            place = Path(tempfile.mkdtemp(dir=folder))
            found = CONTENDERS[name].run(place, model, steps, seed=turn)
            outcomes[name].append(found)
            print(
                f"{workload:<12} {turn:>5}  {name:<18} {found.samples_s:>9.1f} {found.tokens_s:>9.0f} "
                f"{found.tokens / found.samples:>7.1f} {found.rewards[0]:>7.2f} {found.end_reward:>7.2f}",
                flush=True,
            )
    return outcomes


def figures(outcomes: dict[str, list[Outcome]], prefix: str) -> dict[str, float]:
    """Medians over the rounds; ratios are taken round by round."""

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 4)

    def best(found: Sequence[list[Outcome]], turn: int) -> float:
        return max(runs[turn].samples_s for runs in found)

    trl = [runs for name, runs in outcomes.items() if CONTENDERS[name].trl_threads]
    turns = range(len(trl[0]))
    found = {
        "trl_samples_s": median([best(trl, turn) for turn in turns]),
        "trl_end_reward": median([run.end_reward for runs in trl for run in runs]),
    }
    for key, contender in (("", WINDOW_1), ("_on_policy", ON_POLICY)):
        runs = outcomes.get(contender.name, [])
        if runs:
            ratios = [run.samples_s / best(trl, turn) for turn, run in enumerate(runs)]
            found[f"penstock_samples_s{key}"] = median([run.samples_s for run in runs])
            found[f"penstock_end_reward{key}"] = median([run.end_reward for run in runs])
            found[f"ratio{key}"] = median(ratios)
            found[f"ratio{key}_worst"] = round(min(ratios), 4)
    return {prefix + key: value for key, value in found.items()}


def benchmark(quick: bool) -> dict[str, float]:
    steps, rounds = (8, 1) if quick else (60, 3)
    print(f"{SAMPLES} samples of up to {NEW_TOKENS} tokens a step, {steps} steps, {CORES} cores")
    print(f"{'workload':<12} {'round':>5}  {'run':<18} {'samples/s':>9} {'tokens/s':>9} {'tokens':>7} {'reward':>15}")
    with tempfile.TemporaryDirectory() as folder:
        # One of TRL's thread counts is enough to see that everything runs.
        names = [TRL[-1].name, WINDOW_1.name, ON_POLICY.name] if quick else list(CONTENDERS)
        found = figures(measure(Path(folder), "words", steps, rounds, names), "")
        if not quick:
            found |= figures(measure(Path(folder), "full_length", steps // 3, rounds, names), "full_length_")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of the first workload; under a minute")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contender = CONTENDERS[options.contender]
        print(json.dumps(asdict(contender.run_here(options.folder, options.model, options.steps, options.seed))))
        return
    print(json.dumps(benchmark(options.quick)))


if __name__ == "__main__":
    main()
