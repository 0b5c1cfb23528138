"""The README's figures are those of the benchmarks page."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, BENCHMARKS = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/benchmarks.md"))


@pytest.mark.parametrize(
    ("claim", "measured"),
    [
        ("is within 0.6% of the lower bound", "`streaming_over_bound` | 1.006 "),
        ("takes 1.67 times as long", "`batch_over_streaming` | 1.67 "),
        ("4e-7 in float32", "`grad_rel_diff` (fp32) | 3.9e-7 "),
        ("6e-16 in float64", "`grad_rel_diff_fp64` | 6.3e-16 "),
        ("3.2 times as many samples per second as TRL's", "`ratio` 3.23 (3.23)"),
        ("2.3 times if ours is strictly on-policy too", "`ratio_on_policy` 2.30 "),
        ("2.1 and 1.7 times if all responses are equally long", "`full_length_ratio` 2.11 "),
        ("2.1 and 1.7 times if all responses are equally long", "`full_length_ratio_on_policy` 1.69 "),
        ("89,000 tokens per second", "`embedded_tok_s` | 75,928 | 88,912 "),
        ("2.9 to 4.3 times as many as vLLM", "`over_vllm` | 4.34 | 4.31 "),
        ("2.9 to 4.3 times as many as vLLM", "2.9 and 3.1 times vLLM"),
        ("557 injected faults and 18 kills (`kill -9`)", "| 557, 18, 557 |"),
        ("each of 2,880 prompts was trained exactly once", "All 2,880 prompts were trained, each once"),
    ],
)
def test_a_figure_was_measured(claim: str, measured: str) -> None:
    assert claim in README
    assert measured in BENCHMARKS
