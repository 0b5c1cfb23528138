"""The local runtime on one GPU: engine, trainer and a whole run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import penstock
from penstock.config.models import RunConfig
from penstock.rollout.engines.base import GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.training.backends.local import LocalBackend
from tests.run.test_train import steps
from tests.support.tiny_models import save_tiny_model, tiny_model
from tests.training.support import algorithm, training
from tests.training.test_step_worker import assert_offloading_changes_nothing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none")


@pytest.mark.parametrize("kl", [0.0, 0.1], ids=["policy", "policy and reference"])
def test_an_offloaded_trainer_frees_the_device_and_goes_on_as_if_it_never_left(kl: float) -> None:
    rules = algorithm(kl={"coefficient": kl})
    assert_offloading_changes_nothing(torch.device("cuda"), rules)
    network = tiny_model(hidden=256, layers=4).cuda()
    backend = LocalBackend(network, rules, training(), temperature=1.0)
    held = torch.cuda.memory_allocated()
    backend.offload()
    away = torch.cuda.memory_allocated()
    weights_bytes = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    assert held - away >= weights_bytes
    for _ in range(5):
        backend.onload()
        backend.offload()
    assert torch.cuda.memory_allocated() == away


def test_engine_log_probs_agree_with_a_full_forward_on_the_gpu() -> None:
    model = tiny_model("qwen3").cuda()
    reference = tiny_model("qwen3").cuda()
    request = GenerationRequest("r", tuple(range(3, 15)), SamplingParams(max_new_tokens=20, temperature=0.8), seed=5)

    async def generate() -> GenerationResult:
        engine = EmbeddedEngine(model, max_num_seqs=4, max_model_len=64)
        try:
            return await engine.generate(request)
        finally:
            await engine.close()

    result = asyncio.run(generate())
    ids_1T = torch.tensor([[*request.prompt_ids, *result.token_ids]], device="cuda")
    with torch.no_grad():
        logp_TV = torch.log_softmax(reference(ids_1T).logits[0].float() / 0.8, -1)
    start = len(request.prompt_ids)
    expected = [float(logp_TV[start + i - 1, token]) for i, token in enumerate(result.token_ids)]
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("engine_process", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_run_trains_on_the_gpu(tmp_path: Path, dtype: str, engine_process: bool) -> None:
    folder = save_tiny_model(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(32)), encoding="utf-8")
    config = RunConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(folder), "dtype": dtype},
            "data": {"train_path": str(prompts)},
            "rollout": {
                "environment": {"kind": "function", "import_path": "tests.support.rewards:length"},
                "group_size": 4,
                "sampling": {"max_new_tokens": 24},
                "engine": {"max_num_seqs": 16, "max_model_len": 128},
            },
            "staleness": {"policy": "windowed", "max_staleness": 1},
            "algorithm": {"correction": {"kind": "tis"}},
            "training": {"prompt_groups_per_step": 4, "max_steps": 6, "optimizer": {"lr": 1e-3}},
            "runtime": {"device": "cuda", "engine_process": engine_process},
            "observe": {"console": "off"},
        }
    )
    result = penstock.train(config)
    lines = steps(result.run_dir)
    assert len(lines) == 6
    assert result.summary["staleness/lag_max"] <= 1
    assert all(line["train/grad_norm"] > 0 for line in lines)
    if dtype == "float32":
        assert max(line["train/mismatch_logprob_max_abs"] for line in lines if line["staleness/lag_max"] == 0) < 1e-3
