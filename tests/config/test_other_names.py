"""A setting of another system, or of an older Penstock, is answered with ours; the page has the same tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.models import RunConfig
from penstock.config.other_names.answers import answer
from penstock.config.other_names.entries import Entry, Name
from penstock.config.other_names.ours import BEFORE
from penstock.config.other_names.page import filled, places
from penstock.config.other_names.tables import DEFAULTS, FOREIGN, TABLES
from penstock.config.other_names.values import FOREIGN_VALUES
from penstock.config.reading.keys import all_keys
from penstock.config.reading.loading import parse_config
from penstock.config.reading.yaml_dialect import write_yaml
from penstock.errors import ConfigError
from tests.config.settings import problems, settings

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
KEYS = frozenset(all_keys(RunConfig))
PAIRS = [(name, ours, entry) for table in FOREIGN.values() for entry in table.entries for name, ours in entry.pairs()]


def checked(data: dict[str, Any], tmp_path: Path, *overrides: str) -> list[str]:
    """The lines of `penstock config check`, without their indentation."""
    file = tmp_path / "run.yaml"
    file.write_text(write_yaml(data), encoding="utf-8")
    result = CliRunner().invoke(app, ["config", "check", str(file), *overrides])
    assert result.exit_code == 2, result.output
    return [line.strip() for line in result.output.splitlines()]


class TestTheTables:
    def test_every_setting_of_ours_exists(self) -> None:
        ours = {
            own.partition(": ")[0]
            for table in TABLES.values()
            for entry in table.entries
            for _, o in entry.pairs()
            for own in o
        }
        assert len(ours) > 100
        assert {own for own in ours if own not in KEYS and not own.startswith("penstock ")} == set()

    def test_names_pair_one_by_one_where_there_are_as_many(self) -> None:
        entry = Entry("`a.low`, `high` (older)", "`x`, `y`")
        assert list(entry.pairs()) == [(Name(("a", "low")), ("x",)), (Name(("high",)), ("y",))]
        assert list(Entry("`a`, `b`, `c`", "`x`, `y`").pairs())[2] == (Name(("c",)), ("x", "y"))
        assert list(Entry("`a`", "no equivalent").pairs()) == [(Name(("a",)), ())]

    def test_bare_words_are_further_values(self) -> None:
        assert list(Entry("`a.mode: x`, `y`, `a.b`", "").names()) == [
            *(Name(("a", "mode"), "x"), Name(("a", "mode"), "y"), Name(("a", "b")))
        ]

    def test_names_of_classes_are_known_without_them(self) -> None:
        assert list(Entry("`GRPOTrainer(model)`, `AsyncGRPOConfig.max_staleness`", "").names()) == [
            *(Name(("model",)), Name(("max_staleness",)))
        ]


class TestThePage:
    def test_its_tables_are_current(self) -> None:
        page = PAGE.read_text(encoding="utf-8")
        assert page == filled(page), "run: python -m penstock.config.other_names.page docs/coming-from.md"

    def test_it_has_every_table_once(self) -> None:
        assert sorted(places(PAGE.read_text(encoding="utf-8"))) == sorted([*TABLES, *DEFAULTS])

    def test_prose_between_tables_stays(self) -> None:
        page = "before\n<!-- table: areal -->\nold\n<!-- end -->\nafter\n"
        made = filled(page)
        assert made.startswith("before\n<!-- table: areal -->\n\n| AReaL | Penstock | note |\n")
        assert made.endswith("|\n\n<!-- end -->\nafter\n")
        assert "old" not in made


@pytest.mark.parametrize(
    ("name", "ours"),
    [(name, ours) for name, ours, _ in PAIRS if name.dotted not in KEYS],
    ids=lambda value: value.dotted if isinstance(value, Name) else "",
)
def test_every_name_is_answered_where_it_stands_there(name: Name, ours: tuple[str, ...]) -> None:
    lines = problems(**{"__".join(name.path): 1 if name.value is None else name.value})
    [line] = [line for line in lines if line.startswith(f"{name.dotted}: ")]
    if ours:
        assert [own for own in ours if f"`{own}`" not in line] == []
    else:
        assert "has no equivalent" in line or "needs no setting here" in line


class TestTheAnswer:
    @pytest.mark.parametrize(
        ("path", "value", "said"),
        [
            ("beta", 0.1, "`beta` is `algorithm.kl.coefficient` here"),
            ("algorithm.beta", 0.1, "`beta` is `algorithm.kl.coefficient` here"),
            ("actor_rollout_ref.actor.clip_ratio_c", 3, "`actor.clip_ratio_c` is `algorithm.loss.dual_clip` here"),
            ("training.val_period", 5, "`grpo.val_period` is `eval.every_steps` here"),
            ("loss_type", "dapo", "`loss_type: dapo` is `algorithm.loss.aggregation: token_mean` here"),
            ("loss_type", "sapo", "`loss_type: sapo` has no equivalent"),
            ("num_iterations", 2, "`num_iterations` has no equivalent: a group is trained once"),
            ("rollout.calculate_log_probs", True, "`rollout.calculate_log_probs` needs no setting here: always on"),
            ("resume_from_checkpoint", True, "`resume_from_checkpoint` is the command `penstock resume RUN_DIR` here"),
            ("scale_rewards", "sum", "`scale_rewards` is `algorithm.advantage.kind` or "),
        ],
    )
    def test_names_ours(self, path: str, value: Any, said: str) -> None:
        assert (answer(path.split("."), value) or "").startswith(said)

    def test_names_all_where_systems_mean_different_things(self) -> None:
        assert answer(["batch", "max_num_steps"], 3) == "`grpo.max_num_steps` is `training.max_steps` here"
        said = answer(["num_examples"], 3)
        assert said == "`orchestrator.eval.num_examples` is `data.eval_size` here"
        several = answer(["keep", "rollouts_per_example"], 3) or ""
        assert "`orchestrator.rollouts_per_example` of prime-rl is `rollout.group_size` here" in several
        assert "`orchestrator.eval.rollouts_per_example` of prime-rl is `eval.samples_per_prompt` here" in several

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("temperature", "`temperature` is `rollout.sampling.temperature` here"),
            (
                "gradient_accumulation_steps",
                "`gradient_accumulation_steps` is `training.minibatches_per_step` here (their `steps_per_generation` "
                "divided by it)",
            ),
            (
                "grpo.use_leave_one_out_baseline",
                "`grpo.use_leave_one_out_baseline` is `algorithm.advantage.kind: leave_one_out` here (with "
                "`grpo.normalize_rewards`; without it `rloo`)",
            ),
            ("trainer.max_steps", "`trainer.max_steps` is `training.max_steps` here"),
            (
                "policy.generation.vllm_cfg.tensor_parallel_size",
                "`policy.generation.vllm_cfg.tensor_parallel_size` has no equivalent yet: one process, one device",
            ),
            (
                "use_vllm",
                "`use_vllm` has no equivalent yet: there is no vLLM, and embedded is the only engine",
            ),
            ("vllm_gpu_memory_utilization", "`vllm_gpu_memory_utilization` has no equivalent: the cache has a fixed"),
            ("vllm_tensor_parallel_size", "`vllm_tensor_parallel_size` has no equivalent yet: one process, one device"),
            ("actor_rollout_ref.actor.fsdp_config.param_offload", "`actor.fsdp_config.param_offload` has no equiv"),
            ("actor_rollout_ref.rollout.free_cache_engine", "`rollout.free_cache_engine` has no equivalent: "),
        ],
    )
    def test_says_of_one_name_only_what_is_about_it(self, path: str, said: str) -> None:
        found = answer(path.split("."), 1) or ""
        assert found == said or (not said.endswith((")", "here", "device")) and found.startswith(said))

    @pytest.mark.parametrize("path", ["zork", "training.enabled", "buffer.n", "data.name", "rollout.split"])
    def test_is_silent_where_a_name_says_nothing(self, path: str) -> None:
        assert answer(path.split("."), 1) is None


class TestValues:
    """A value that another system has is answered with ours, never with an algorithm that only looks like it."""

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("algorithm.loss.kind", "grpo", "`grpo` is `algorithm.loss.kind: ppo_clip` here"),
            ("algorithm.loss.kind", "ppo", "`ppo` is `algorithm.loss.kind: ppo_clip` here"),
            ("algorithm.loss.kind", "dapo", "`dapo` is `algorithm.loss.kind: ppo_clip` here"),
            ("algorithm.loss.kind", "dr_grpo", "`algorithm.loss.aggregation: token_sum_norm` here"),
            ("algorithm.loss.aggregation", "token-mean", "`algorithm.loss.aggregation: token_mean` here"),
            ("algorithm.loss.aggregation", "seq-mean-token-mean", "`algorithm.loss.aggregation: sequence_mean` here"),
            ("algorithm.loss.aggregation", "seq-mean-token-sum", "`algorithm.loss.constant_length: 1`"),
            (
                "algorithm.loss.aggregation",
                "seq-mean-token-sum-norm",
                "`algorithm.loss.aggregation: token_sum_norm` here",
            ),
            ("algorithm.advantage.kind", "dr_grpo", "`algorithm.advantage.normalize_std: false`"),
            ("algorithm.advantage.kind", "gae", "`gae` has no equivalent: there is no critic"),
            ("algorithm.advantage.kind", "reinforce_plus_plus", "`algorithm.advantage.kind: reinforce_pp` here"),
            ("algorithm.correction.kind", "sequence_mask", "`algorithm.correction.kind: sequence_masked` here"),
            ("staleness.policy", "one-step-off-policy", "`staleness.policy: in_order` here"),
        ],
    )
    def test_of_others_are_answered(self, key: str, value: str, said: str) -> None:
        [line] = problems(**{key.replace(".", "__"): value})
        assert line.startswith(f"{key}: unknown '{value}'; ")
        assert said in line
        assert "did you mean" not in line

    @pytest.mark.parametrize("value", ["gspx", "pgpo", "ppo_kl", "cppo"])
    def test_algorithms_are_not_guessed(self, value: str) -> None:
        for key in ("algorithm__loss__kind", "algorithm__advantage__kind"):
            [line] = problems(**{key: value})
            assert "did you mean" not in line

    @pytest.mark.parametrize(
        ("key", "value", "meant"),
        [
            ("algorithm__loss__kind", "reinforse", "reinforce"),
            ("algorithm__advantage__kind", "leave_one_ot", "leave_one_out"),
            ("algorithm__correction__kind", "sequence_maskd", "sequence_masked"),
        ],
    )
    def test_typos_of_long_names_are(self, key: str, value: str, meant: str) -> None:
        [line] = problems(**{key: value})
        assert f"did you mean {meant}?" in line

    def test_every_answer_names_settings_and_values_of_ours(self) -> None:
        for key, values in FOREIGN_VALUES.items():
            assert key in KEYS
            for said in values.values():
                for code in re.findall(r"`([a-z_]+\.[a-z_.]+(?:: \w+)?)`", said):
                    own, _, value = code.partition(": ")
                    assert own in KEYS, code
                    if own in (*FOREIGN_VALUES,) and value:
                        assert not any(f"unknown '{value}'" in line for line in _problems_of(own, value)), code


def _problems_of(key: str, value: str) -> list[str]:
    try:
        parse_config(settings(**{key.replace(".", "__"): value}))
    except ConfigError as error:
        return error.problems
    return []


class TestConfigCheck:
    def test_names_of_four_systems_at_once(self, tmp_path: Path) -> None:
        data = settings(
            beta=0.04,
            training__learning_rate=1e-5,
            rollout__n=8,
            actor_rollout_ref={"actor": {"optim": {"lr": 1e-6}, "ppo_epochs": 2, "surprise": 1}},
            grpo={"num_prompts_per_step": 32, "adv_estimator": {"name": "reinforce_plus_plus"}},
            orchestrator={"batch_size": 128},
        )
        lines = checked(data, tmp_path)
        for start in (
            "beta: unknown setting; `beta` is `algorithm.kl.coefficient` here",
            "training.learning_rate: unknown setting; `learning_rate` is `training.optimizer.lr` here",
            "rollout.n: unknown setting; `rollout.n` is `rollout.group_size` here",
            "actor_rollout_ref.actor.optim.lr: unknown setting; `actor.optim.lr` is `training.optimizer.lr` here",
            "actor_rollout_ref.actor.ppo_epochs: unknown setting; `actor.ppo_epochs` has no equivalent: a group is",
            "actor_rollout_ref: unknown setting; nothing here is called actor_rollout_ref.actor.surprise",
            "grpo.num_prompts_per_step: unknown setting; `grpo.num_prompts_per_step` is ",
            "grpo.adv_estimator.name: unknown setting; `grpo.adv_estimator.name: reinforce_plus_plus` is "
            "`algorithm.advantage.kind: reinforce_pp_baseline` here",
            "orchestrator.batch_size: unknown setting; `orchestrator.batch_size` is `training.prompt_groups_per_step`",
        ):
            assert len([line for line in lines if line.startswith(start)]) == 1, (start, lines)

    def test_a_name_on_the_command_line(self, tmp_path: Path) -> None:
        lines = checked(settings(), tmp_path, "actor_rollout_ref.actor.clip_ratio_high=0.28")
        key = "actor_rollout_ref.actor.clip_ratio_high"
        assert f"{key}: unknown setting; `actor.clip_ratio_high` is `algorithm.loss.clip_ratio_high` here" in lines

    def test_a_misspelt_name_beside_a_name_of_another_system(self, tmp_path: Path) -> None:
        [line] = [line for line in checked(settings(training__optimizer__beta=0.9), tmp_path) if "unknown" in line]
        assert "`beta` is `algorithm.kl.coefficient` here" in line
        assert line.endswith("; or did you mean training.optimizer.betas?")

    def test_every_name_of_before(self, tmp_path: Path) -> None:
        data = settings()
        for old in BEFORE:
            if old not in ("sampler", "weights"):
                *sections, name = old.split(".")
                section = data
                for part in sections:
                    section = section.setdefault(part, {})
                section[name] = 1
        lines = checked(data, tmp_path)
        missing = [
            old
            for old, now in BEFORE.items()
            if old not in ("sampler", "weights") and f"{old}: unknown setting; `{old}` is `{now}` here" not in lines
        ]
        assert missing == []
