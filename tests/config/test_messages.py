"""What a person reads when a setting is wrong."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.models import RunConfig
from penstock.config.reading.keys import all_keys
from penstock.config.reading.loading import parse_config
from penstock.errors import ConfigError
from tests.config.settings import problems, settings


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training__prompt_group_per_step", "training.prompt_groups_per_step"),
        ("trainning", "training"),
        ("staleness__max_stalness", None),
        ("training__max_inflight_groups", "rollout.max_inflight_groups"),
        ("data__sed", "seed"),
        ("prompt_group_per_step", "training.prompt_groups_per_step"),
    ],
)
def test_unknown_setting_names_the_one_that_was_meant(key: str, meant: str | None) -> None:
    dotted = key.replace("__", ".")
    if meant is None:
        lines = problems(staleness={"policy": "windowed", "max_stalness": 1})
        meant = "staleness.max_staleness"
    else:
        lines = problems(**{key: 1})
    assert lines == [f"{dotted}: unknown setting; did you mean {meant}?"]


def test_unknown_setting_with_no_near_name_lists_what_there_is() -> None:
    assert problems(buffer__zork=1) == ["buffer.zork: unknown setting; buffer has max_buffered_groups"]


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("training__optimizer__lr", "fast", "training.optimizer.lr: expected a number, got 'fast'"),
        ("training__optimizer__lr", "0.1", "training.optimizer.lr: expected a number, got '0.1'; remove the quotes"),
        ("training__optimizer__lr", None, "training.optimizer.lr: expected a number, got nothing"),
        ("training__optimizer__eps", 0, "training.optimizer.eps: must be more than 0, got 0"),
        ("training__optimizer__lr", float("inf"), "training.optimizer.lr: must be a finite number, got inf"),
        ("training__optimizer__betas", [0.9], "training.optimizer.betas: takes 2 values, got 1"),
        ("training__optimizer__betas", [], "training.optimizer.betas: takes 2 values, got 0"),
        ("training__optimizer__betas", [0.1, 0.2, 0.3], "training.optimizer.betas: takes 2 values, got 3"),
        ("training__optimizer__betas", [0.9, 1.5], "training.optimizer.betas[1]: must be less than 1, got 1.5"),
        ("training__optimizer__betas", 0.9, "training.optimizer.betas: expected a list, got 0.9"),
        ("training__max_steps", 1e3, "training.max_steps: expected a whole number, got 1000.0; write 1000"),
        ("training__max_steps", True, "training.max_steps: expected a whole number, got true"),
        ("training__max_steps", [3], "training.max_steps: expected a whole number, got a list"),
        ("seed", -1, "seed: must be at least 0, got -1"),
        ("deterministic", "true", "deterministic: expected true or false, got 'true'; remove the quotes"),
        ("run_dir", 2024, "run_dir: expected text, got 2024; put it in quotes"),
        ("run_dir", "x" * 99, ""),
        (
            "model__dtype",
            "bf16",
            "model.dtype: unknown 'bf16'; did you mean bfloat16? (one of float32, float64, bfloat16)",
        ),
        ("model__dtype", 16, "model.dtype: unknown 16; one of float32, float64, bfloat16"),
        ("training__backend", "fsdp", "training.backend: unknown 'fsdp'; one of local, none"),
        ("runtime__kind", "ray", "runtime.kind: unknown 'ray'; the only choice is local"),
        ("rollout__environment__args", 3, "rollout.environment.args: expected a mapping of names to values, got 3"),
        ("buffer", None, "buffer: is empty; remove it, or set some of max_buffered_groups"),
        ("buffer", 32, "buffer: expected a section with some of max_buffered_groups, got 32"),
        ("rollout__sampling__stop_token_ids", [1, "x"], None),
    ],
)
def test_wrong_value_says_what_was_expected_and_what_came(key: str, value: Any, line: str | None) -> None:
    if line == "":
        parse_config(settings(**{key: value}))
        return
    expected = line or "rollout.sampling.stop_token_ids[1]: expected a whole number, got 'x'"
    assert problems(**{key: value}) == [expected]


def test_missing_settings_are_described() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({})
    assert caught.value.problems == [
        "model.path: is required. Folder with a Hugging Face causal language model and its tokenizer, or a hub id (see "
        "`download`).",
        "rollout.environment.kind: is required. `reasoning_gym:<task>`, `math`, `calculator`, `function`, "
        "`verifiers:<environment>` or `custom`.",
    ]


def test_every_wrong_key_has_its_own_line() -> None:
    lines = problems(seed="x", training__max_step=3, model__dtype="int4")
    assert [line.partition(":")[0] for line in lines] == ["seed", "model.dtype", "training.max_step"]


class TestChoices:
    """Sections whose kind decides which settings they have."""

    KINDS = "on_policy, windowed, in_order, weight_fifo, ready_first, custom"

    def test_unknown_kind(self) -> None:
        assert problems(staleness__policy="windowd") == [
            f"staleness.policy: unknown 'windowd'; did you mean windowed? (one of {self.KINDS})"
        ]
        assert problems(algorithm__correction__kind="icepopp") == [
            "algorithm.correction.kind: unknown 'icepopp'; did you mean icepop? (one of none, tis, icepop, "
            "sequence_masked, decoupled)"
        ]

    def test_missing_kind(self) -> None:
        assert problems(staleness__max_staleness=3) == [f"staleness.policy: is required; one of {self.KINDS}"]

    def test_kind_that_is_no_text(self) -> None:
        assert problems(staleness__policy=None) == [f"staleness.policy: unknown nothing; one of {self.KINDS}"]

    def test_no_section(self) -> None:
        assert problems(staleness="windowed") == [
            f"staleness: expected a section such as {{policy: windowed}} with one of {self.KINDS}, got 'windowed'"
        ]
        assert problems(staleness=[1])[0].endswith("got a list")

    def test_setting_of_another_kind(self) -> None:
        assert problems(staleness={"policy": "windowed", "lookahead": 2}) == [
            "staleness.lookahead: is not a setting of policy = windowed; it has max_staleness, over_sampling, order "
            "(lookahead belongs to in_order, weight_fifo, ready_first)"
        ]
        assert problems(algorithm__correction={"kind": "none", "cap": 2}) == [
            "algorithm.correction.cap: is not a setting of kind = none; it has no settings (cap belongs to tis, "
            "decoupled)"
        ]

    def test_wrong_value_inside_has_no_union_tag_in_its_key(self) -> None:
        assert problems(staleness={"policy": "windowed", "max_staleness": -1}) == [
            "staleness.max_staleness: must be at least 0, got -1"
        ]
        assert problems(algorithm__correction={"kind": "tis", "cap": "x"}) == [
            "algorithm.correction.cap: expected a number, got 'x'"
        ]

    def test_own_validator_inside(self) -> None:
        assert problems(staleness={"policy": "custom", "import_path": "nope"}) == [
            "staleness.import_path: write it as module:Class, for example my_project.policies:Newest"
        ]

    def test_required_setting_of_a_kind(self) -> None:
        (line,) = problems(staleness={"policy": "custom"})
        assert line.startswith("staleness.import_path: is required. ")


def test_contradictions_are_separate_lines_without_noise() -> None:
    assert problems(deterministic=True, rollout__group_size=1) == [
        "rollout.group_size: grpo compares the responses of a group with each other and needs at least 2",
        "deterministic: needs staleness.policy = in_order and staleness.lookahead = 0, so that groups train in order",
        "deterministic: needs weight_sync.mode = drain, so that no group sees two weight versions",
    ]


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_any_thread_count_goes_with_deterministic(threads: int) -> None:
    good = {"staleness": {"policy": "in_order", "lookahead": 0}, "weight_sync__mode": "drain", "deterministic": True}
    config = parse_config(settings(**good, runtime__engine_threads=threads))
    assert config.runtime.engine_threads == threads


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@hypothesis.settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(sorted(all_keys(RunConfig))), value=_JSON)
def test_any_value_anywhere_is_accepted_or_rejected_by_its_key(key: str, value: Any) -> None:
    lines: list[str] = []
    try:
        parse_config(settings(**{key.replace(".", "__"): value}))
    except ConfigError as error:
        lines = error.problems or ["no problems were given"]
    section = key.partition(".")[0]
    assert all(line.startswith((section, "training.max_steps: is needed")) or key in line for line in lines)


def test_names_that_are_no_text_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**settings(), 5: 1})  # type: ignore[dict-item]
    assert caught.value.problems == ["5: the name of a setting must be text; put it in quotes"]
