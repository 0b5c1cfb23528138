"""The page for people from other systems: our settings on it exist and mean what it says, and so do TRL's."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from penstock.buffer.samplers.factory import check_capacity, make_sampler
from penstock.config.models import RunConfig
from penstock.config.reading.keys import KeySpec, all_keys, members_of
from penstock.config.reading.loading import parse_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.config.sections.algorithm import PpoClipLoss
from penstock.config.sections.base import Section
from penstock.config.sections.data import DataConfig
from tests.config.settings import settings
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
TEXT = PAGE.read_text(encoding="utf-8")
KEYS = frozenset(all_keys(RunConfig))
COMMANDS = ("penstock resume RUN_DIR", "penstock eval", "penstock config check")
_CODE = re.compile(r"`([^`\n]+)`")
_FENCED = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table, and where it stands."""

    framework: str
    """The heading of the second level above it."""
    header: tuple[str, ...]
    cells: tuple[str, ...]

    def codes(self, column: str) -> list[str]:
        """What stands in backticks in the column of that name."""
        return _CODE.findall(self.cells[self.header.index(column)])


def _rows(text: str) -> Iterator[Row]:
    framework, header = "", tuple[str, ...]()
    for line in _FENCED.sub("", text).splitlines():
        if line.startswith("## "):
            framework = line.removeprefix("## ")
        if not line.startswith("|"):
            header = ()
            continue
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if not header:
            header = cells
        elif not set(line) <= set("|- "):
            yield Row(framework, header, cells)


ROWS = list(_rows(TEXT))
MAPPED = [row for row in ROWS if "Penstock" in row.header]
DEFAULTS = [row for row in MAPPED if "ours" in row.header]
TRL = [row for row in MAPPED if row.framework == "TRL"]


def _sections(prefix: tuple[str, ...]) -> list[type[Section]]:
    """The models that may stand at a key: several where `kind` decides."""
    found: list[type[Section]] = [RunConfig]
    for name in prefix:
        fields = [section.model_fields[name] for section in found if name in section.model_fields]
        found = [child for field in fields for child in KeySpec.of(field.annotation).sections]
    return found


def _accepts(section: type[Section], name: str, value: Any) -> bool:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return not any(problem["loc"][:1] == (name,) for problem in error.errors())
    return True


def _problem(code: str) -> str | None:
    """What is wrong with `key` or `key: value` of ours."""
    key, _, text = code.partition(": ")
    if key not in KEYS:
        return f"{key} is not a setting"
    *prefix, name = key.split(".")
    holders = [section for section in _sections(tuple(prefix)) if name in section.model_fields]
    if text and not any(_accepts(section, name, parse_yaml(text)) for section in holders):
        return f"{key} does not take {text}"
    return None


def _names_of_ours() -> set[str]:
    """Parts of keys, and the values that settings choose from."""
    names = {part for key in KEYS for part in key.split(".")}
    for key in KEYS:
        *prefix, name = key.split(".")
        for section in _sections(tuple(prefix)):
            if name in section.model_fields:
                chosen = members_of(section.model_fields[name].annotation)
                names |= {str(value) for t in chosen if get_origin(t) is Literal for value in get_args(t)}
    return names | {"calculator", "custom", "function", "math"}


def _value_at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _says(cell: str, value: Any) -> bool:
    """Whether a cell such as "`512`" or "nothing: all" shows this default."""
    code = _CODE.match(cell)
    if code is None:
        return cell.startswith("nothing") and value is None
    if isinstance(value, bool) or value is None:
        return parse_yaml(code[1]) is value
    if isinstance(value, int | float):
        return float(code[1]) == value
    return code[1] == str(value.value if isinstance(value, Enum) else value)


def _merged(data: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(data[name], other[name]) for name in data.keys() & other.keys() if isinstance(data[name], dict)
    }
    return data | dict(other) | both


class TestOurSettings:
    def test_the_page_has_a_table_for_each_framework(self) -> None:
        assert {row.framework for row in MAPPED} == {
            *("TRL", "verl", "NeMo-RL", "prime-rl and AReaL"),
            *("Names used elsewhere", "Penstock before"),
        }
        assert {row.framework for row in DEFAULTS} == {"TRL", "verl", "NeMo-RL"}
        assert all(len(row.cells) == len(row.header) for row in ROWS)

    def test_keys_and_values_in_the_tables_exist(self) -> None:
        codes = [code for row in MAPPED for code in row.codes("Penstock") if code not in COMMANDS]
        assert len(codes) > 200
        assert [problem for problem in map(_problem, codes) if problem] == []

    def test_keys_and_values_in_prose_and_notes_exist(self) -> None:
        notes = [row.cells[row.header.index("note")] for row in MAPPED if "note" in row.header]
        prose = [line for line in _FENCED.sub("", TEXT).splitlines() if not line.startswith("|")]
        codes = _CODE.findall("\n".join([*notes, *prose]))
        ours = [code for code in codes if code.partition(".")[0] in RunConfig.model_fields and "." in code]
        assert len(ours) > 50
        assert [problem for problem in map(_problem, ours) if problem] == []

    def test_no_row_leaves_open_what_the_equivalent_is(self) -> None:
        said = ("no equivalent", "always", "with one update")
        unclear = [
            row.cells
            for row in MAPPED
            if row not in DEFAULTS
            and not row.codes("Penstock")
            and not row.cells[row.header.index("Penstock")].startswith(said)
        ]
        assert unclear == []

    def test_defaults_are_ours(self) -> None:
        config = parse_config(settings(model__lora={}))
        wrong = [
            (key, _value_at(config, key))
            for row in DEFAULTS
            for key in row.codes("Penstock")
            if not _says(row.cells[row.header.index("ours")], _value_at(config, key))
        ]
        assert wrong == []

    @pytest.mark.parametrize("block", [b for b in blocks(TEXT) if b.info == "yaml"], ids=lambda b: f"line {b.line}")
    def test_yaml_is_a_run_that_could_start(self, block: Any) -> None:
        config = parse_config(_merged(settings(), parse_yaml(block.code)))
        sampler = make_sampler(config.staleness, config.training.prompt_groups_per_step)
        check_capacity(sampler, config.buffer.max_buffered_groups, config.training.min_groups_per_chunk)

    def test_wrong_keys_and_values_are_found(self) -> None:
        assert _problem("algorithm.loss.clip_hihg") == "algorithm.loss.clip_hihg is not a setting"
        assert _problem("algorithm.loss.aggregation: tokens") == "algorithm.loss.aggregation does not take tokens"
        assert _problem("algorithm.correction.kind: tiss") == "algorithm.correction.kind does not take tiss"
        assert _problem("rollout.environment.kind: maths") == "rollout.environment.kind does not take maths"
        assert _problem("algorithm.correction.mean: geometric") is None


@pytest.fixture(scope="module")
def names() -> dict[str, set[str]]:
    """Names of TRL by where they belong; those of `GRPOConfig` under the empty name.

    Its trainers are read, not imported, which takes long.
    """
    import trl

    folder = Path(trl.__file__).parent
    return {
        "": {field.name for field in dataclasses.fields(trl.GRPOConfig)},
        "ModelConfig": {field.name for field in dataclasses.fields(trl.ModelConfig)},
        "AsyncGRPOConfig": _declared(folder / "experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig"),
        "GRPOTrainer": _declared(folder / "trainer/grpo_trainer.py", "GRPOTrainer"),
    }


def _declared(file: Path, name: str) -> set[str]:
    """Fields of a class and parameters of its constructor, as its source has them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    fields = {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    makers = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return fields | {argument.arg for maker in makers for argument in maker.args.args}


class TestTrl:
    """Against the installed package."""

    def test_the_installed_version_is_the_one_the_page_names(self) -> None:
        import trl

        version = trl.__version__
        assert f"TRL {'.'.join(version.split('.')[:2])} " in TEXT

    def test_settings_exist(self, names: dict[str, set[str]]) -> None:
        codes = [code for row in TRL for code in row.codes("TRL")]
        assert len(codes) > 80
        unknown = []
        for code in codes:
            name = code.partition(": ")[0]
            owner, _, own = name.removesuffix(")").replace("(", ".").rpartition(".")
            if own not in names[owner]:
                unknown.append(code)
        assert unknown == []

    def test_values_are_in_its_documentation(self) -> None:
        described = inspect.getdoc(importlib.import_module("trl").GRPOConfig) or ""
        pairs = [code.split(": ") for row in TRL for code in row.codes("TRL") if ": " in code]
        values = [value for _, value in pairs if value not in ("True", "False")]
        assert len(values) > 10
        assert [value for value in values if f'"{value}"' not in described] == []

    def test_names_in_notes_are_theirs_or_ours(self, names: dict[str, set[str]]) -> None:
        notes = [code for row in TRL if "note" in row.header for code in row.codes("note")]
        words = [code.partition(": ")[0] for code in notes if re.fullmatch(r"[a-z_]+(: \w+)?", code)]
        known = _names_of_ours() | names[""] | {"dtype", "attn_implementation", "datasets"}
        assert [word for word in words if word not in known] == []

    def test_defaults_are_theirs(self) -> None:
        defaults = {
            field.name: field.default for field in dataclasses.fields(importlib.import_module("trl").GRPOConfig)
        }
        rows = [row for row in DEFAULTS if row.framework == "TRL"]
        pairs = [(row.codes("TRL")[0], row.cells[row.header.index("theirs")]) for row in rows]
        assert [pair for pair in pairs if not _says(pair[1], defaults[pair[0]])] == []

    def test_batch_arithmetic(self, tmp_path: Path) -> None:
        row = next(row for row in ROWS if row.cells[0] == "TRL, one process")
        given = {name: int(value) for name, value in (code.split("=") for code in row.codes("settings"))}
        theirs = _grpo_config(tmp_path)(**given)
        block = next(b for b in blocks(TEXT) if "several updates need the whole step" in b.code)
        ours = parse_config(_merged(settings(), parse_yaml(block.code)))
        prompts = theirs.generation_batch_size // theirs.num_generations
        updates = theirs.steps_per_generation // theirs.gradient_accumulation_steps
        assert (prompts, updates) == (ours.training.prompt_groups_per_step, ours.training.minibatches_per_step)
        assert theirs.num_generations == ours.rollout.group_size

    def test_the_example_is_the_same_run_in_both(self, tmp_path: Path) -> None:
        theirs_block, ours_block = [b for b in blocks(TEXT.partition("\n## TRL\n")[2]) if b.info][:2]
        namespace: dict[str, Any] = {"GRPOConfig": _grpo_config(tmp_path)}
        exec(compile(theirs_block.code, str(PAGE), "exec"), namespace)
        theirs, ours = namespace["args"], parse_config(_merged(settings(), parse_yaml(ours_block.code)))
        optimizer, loss = ours.training.optimizer, ours.algorithm.loss
        assert isinstance(loss, PpoClipLoss)
        assert theirs.generation_batch_size == ours.training.prompt_groups_per_step * ours.rollout.group_size
        assert theirs.max_completion_length == ours.rollout.sampling.max_new_tokens
        assert (theirs.learning_rate, theirs.warmup_steps) == (optimizer.lr, optimizer.warmup_steps)
        assert (theirs.lr_scheduler_type, theirs.max_steps) == (optimizer.schedule, ours.training.max_steps)
        assert (theirs.epsilon, theirs.epsilon_high) == (loss.clip_ratio_low, loss.clip_ratio_high)
        assert (theirs.loss_type, loss.aggregation) == ("dapo", "token_mean")
        assert theirs.beta == ours.algorithm.kl.coefficient
        assert theirs.gradient_checkpointing == ours.training.gradient_checkpointing


def _grpo_config(folder: Path) -> Any:
    """`GRPOConfig`, made to be constructed on any machine."""
    import trl

    return partial(trl.GRPOConfig, output_dir=str(folder), use_cpu=True, bf16=False)


def test_a_file_made_for_verl_is_read_as_the_page_says(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    from penstock.rollout.datasets import read_prompts

    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2 + 3?"}],
        "reward_model": {"ground_truth": "5", "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    block = next(b for b in blocks(TEXT) if "answer_key: reward_model" in b.code)
    data = parse_yaml(block.code)["data"] | {"train_path": str(path)}
    [prompt] = read_prompts(DataConfig.model_validate(data), "train")
    assert prompt.answer["ground_truth"] == "5"
    assert prompt.messages == ({"role": "user", "content": "2 + 3?"},)
