"""Columns that environments declare: what may be declared, what a sample may give, and what becomes of it in rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.controller.failures.classify import classify
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.field_spec import DTYPES
from penstock.errors import ConfigError, FailureKind, WrongColumn
from penstock.rollout.environments import (
    Done,
    ExtraColumn,
    MultiTurnEnvironment,
    Prompt,
    Segment,
    SingleTurnEnvironment,
    Split,
    Trajectory,
)
from penstock.rollout.environments.base import GenerationHandle
from penstock.rollout.environments.extra_columns import declared_columns, row_schema
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.rewards.scores import combined_by_name
from penstock.rollout.extra_values import with_columns
from penstock.rollout.manager import PARTITION
from penstock.rollout.prompts import PromptVisit
from tests.rollout.talking import Talker
from tests.rollout.test_manager import answer, manager
from tests.support.scripted_run import ScriptedEnvironment

HERE = __name__
VISIT = PromptVisit(epoch=0, prompt=Prompt("5", "5"))
PER_TOKEN = ExtraColumn("confidence", "per_token", "float32")
FEATURES = ExtraColumn("features", "fixed", "float32", shape=(2, 3))
HINTS = ExtraColumn("hints", "fixed", "int64", metric="sum")
NOTES = ExtraColumn("notes", "object")
ALL = (PER_TOKEN, FEATURES, HINTS, NOTES)


def values(length: int, **changes: Any) -> dict[str, Any]:
    """A value for each of `ALL`."""
    given = {
        "confidence": [token / 8 for token in range(length)],
        "features": np.arange(6, dtype=np.float32).reshape(2, 3),
        "hints": 3,
        "notes": {"seen": ["a", None]},
    }
    return {**given, **changes}


def trajectory(columns: Mapping[str, Any], length: int = 4, **more: Any) -> Trajectory:
    return Trajectory((Segment(tuple(range(length))),), 1.0, "said", columns=columns, **more)


@dataclass
class Giving(ScriptedEnvironment):
    """Declares columns; every sample has what `gives` says for its row's length."""

    extra_columns: tuple[ExtraColumn, ...] = ALL
    gives: Callable[[int], dict[str, Any]] = values

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        played = await super().run(prompt, handle)
        return replace(played, columns=self.gives(played.row_length))


class TestDeclarations:
    @pytest.mark.parametrize("name", [*fields.SPECS, fields.VALID_TOKENS])
    def test_a_name_of_penstocks_own_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"'{name}' is a column that Penstock writes itself; choose another name"):
            ExtraColumn(name, "object")

    @pytest.mark.parametrize(
        ("column", "why"),
        [
            ({"name": "a/b", "kind": "object"}, "is not a name"),
            ({"name": "", "kind": "object"}, "is not a name"),
            ({"name": "a" * 101, "kind": "object"}, "is not a name"),
            (
                {"name": "a", "kind": "jagged", "dtype": "int64"},
                "has the kind 'jagged'; use per_token",
            ),
            ({"name": "a", "kind": "fixed"}, "has the dtype None; use one of"),
            ({"name": "a", "kind": "fixed", "dtype": "floating"}, "has the dtype 'floating'"),
            ({"name": "a", "kind": "object", "dtype": "int64"}, "have no dtype and no shape"),
            ({"name": "a", "kind": "object", "metric": "mean"}, "cannot be a metric"),
            ({"name": "a", "kind": "fixed", "dtype": "int64", "metric": "median"}, "use mean, sum or max"),
            ({"name": "a", "kind": "fixed", "dtype": "int64", "shape": (2,), "metric": "sum"}, "cannot be a metric"),
            ({"name": "a", "kind": "per_token", "dtype": "int64", "metric": "sum"}, "cannot be a metric"),
            ({"name": "a", "kind": "fixed", "dtype": "int64", "shape": (-1,)}, "use whole numbers"),
            ({"name": "a", "kind": "fixed", "dtype": "int64", "missing": 2.0}, "every row must have it"),
            ({"name": "a", "kind": "fixed", "dtype": "int8", "optional": True, "missing": 0.5}, "whole numbers"),
            ({"name": "a", "kind": "fixed", "dtype": "int8", "optional": True, "missing": float("nan")}, "whole"),
            ({"name": "a", "kind": "fixed", "dtype": "int8", "optional": True, "missing": float("inf")}, "whole"),
            *(
                ({"name": "a", "kind": "fixed", "dtype": dtype, "optional": True, "missing": missing}, why)
                for dtype, missing, why in (
                    ("uint8", -1, "'a' has -1 for rows without it, which uint8 cannot hold: use 0 to 255"),
                    ("int64", 2**63, "which int64 cannot hold"),
                    ("int64", 2**63 - 1, "which a float cannot hold exactly"),
                    ("bool", 0.5, "whole numbers"),
                    ("bool", 2, "which bool cannot hold: use 0 to 1"),
                    ("int64", "none", "'a' has 'none' for rows without it, which is not a number"),
                    ("float32", None, "None for rows without it, which is not a number"),
                    ("float16", 1e5, "has 100000.0 for rows without it, which float16 cannot hold"),
                    ("float64", 10**400, "which float64 cannot hold"),
                    ("float8_e4m3fn", float("inf"), "inf for rows without it, which float8_e4m3fn cannot hold"),
                )
            ),
        ],
    )
    def test_what_cannot_be_stored_is_refused(self, column: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            ExtraColumn(**column)

    @pytest.mark.parametrize("dtype", sorted(DTYPES))
    def test_the_largest_number_of_a_dtype_may_stand_for_a_missing_one(self, dtype: str) -> None:
        kind = getattr(torch, dtype)
        is_real = kind.is_floating_point or kind.is_complex
        # The next below 2**63 that a float holds.
        largest = 1 if kind is torch.bool else torch.finfo(kind).max if is_real else torch.iinfo(kind).max
        largest = 2**63 - 1024 if kind is torch.int64 else largest
        column = ExtraColumn("own", "fixed", dtype, optional=True, missing=largest)
        found = with_columns(trajectory({}), (column,), "game", "g_g0").columns["own"]
        assert found.dtype == kind
        assert found.item() == largest

    def test_columns_with_nan_for_a_missing_value_are_the_same(self) -> None:
        one, other = (replace(PER_TOKEN, optional=True, missing=float("nan")) for _ in range(2))
        assert one == other
        assert hash(one) == hash(other)
        assert one != replace(one, missing=0.0)

    def test_a_column_that_is_declared_twice_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="'notes' is declared twice"):
            declared_columns(Giving(1, extra_columns=(NOTES, NOTES)))

    @pytest.mark.parametrize(
        ("name", "why"),
        [("Unreadable", "raised ZeroDivisionError"), ("Untyped", "give a tuple of ExtraColumn objects, not 'notes'")],
    )
    def test_settings_name_the_class_whose_declaration_is_wrong(self, name: str, why: str) -> None:
        config = EnvironmentConfig(kind="custom", import_path=f"{HERE}:{name}")
        with pytest.raises(ConfigError, match=f"rollout.environment.import_path: {HERE}:{name}.extra_columns.* {why}"):
            make_environment(config, DataConfig(), seed=0)

    def test_rows_have_them_next_to_penstocks_own(self) -> None:
        schema = row_schema(ALL)
        assert schema[: len(fields.ROW_SCHEMA)] == fields.ROW_SCHEMA
        assert [str(spec) for spec in schema[len(fields.ROW_SCHEMA) :]] == [
            "per-token float32",
            "fixed float32",
            "fixed int64",
            "object",
        ]


def test_numbers_of_a_step_become_one_as_declared() -> None:
    numbers = [{"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 3.0, "b": 5.0}, {}]
    assert combined_by_name(numbers) == {"a": 2.0, "b": 3.5, "c": 3.0}
    assert combined_by_name(numbers, {"a": "sum", "b": "max", "c": "mean"}) == {"a": 4.0, "b": 5.0, "c": 3.0}


class TestGroups:
    def plane(self, environment: Giving) -> MemoryDataPlane:
        plane = MemoryDataPlane()
        plane.register_partition(PARTITION, row_schema(environment.extra_columns))
        return plane

    async def test_the_rows_of_a_group_hold_them(self) -> None:
        environment = Giving(1)
        plane = self.plane(environment)
        pushed = await manager(environment, answer, plane, schema=None).generate_and_push(VISIT, "grp", 0)
        assert pushed.meta.fields == {*fields.ROLLOUT_FIELDS, "confidence", "features", "hints", "notes"}
        batch = plane.get_samples(pushed.meta, ["confidence", "features", "hints", "notes"])
        assert [batch.jagged("confidence").row(row).tolist() for row in range(3)] == [[0.0, 0.125, 0.25, 0.375]] * 3
        assert batch.tensor("features").shape == (3, 2, 3)
        assert batch.tensor("hints").tolist() == [3, 3, 3]
        assert batch.objects("notes").items == ({"seen": ["a", None]},) * 3
        assert [tags["metrics"] for tags in pushed.meta.tags] == [{"hints": 3.0}] * 3
        assert [tags["aggregations"] for tags in pushed.meta.tags] == [{"hints": "sum"}] * 3

    async def test_an_environment_may_use_its_memory_for_the_next_sample(self) -> None:
        array, note, count = np.zeros((2, 3), dtype=np.float32), {"seen": [0]}, itertools.count(1)

        def gives(length: int) -> dict[str, Any]:
            number = next(count)
            array[:], note["seen"][0] = number, number
            return values(length, features=array, hints=number, notes=note)

        environment = Giving(1, gives=gives)
        plane = self.plane(environment)
        pushed = await manager(environment, answer, plane, schema=None).generate_and_push(VISIT, "grp", 0)
        note["seen"].append(0)
        batch = plane.get_samples(pushed.meta, ["features", "hints", "notes"])
        numbers = batch.tensor("hints").tolist()
        assert sorted(numbers) == [1, 2, 3]
        assert batch.tensor("features")[:, 0, 0].tolist() == numbers
        assert batch.objects("notes").items == tuple({"seen": [number]} for number in numbers)

    async def test_one_wrong_sample_fails_its_group_as_data_and_leaves_no_rows(self) -> None:
        counts = iter((4, 4, 9))
        environment = Giving(1, gives=lambda length: values(next(counts)))
        plane = self.plane(environment)
        with pytest.raises(WrongColumn, match="scripted: sample grp_g2: the column 'confidence'") as raised:
            await manager(environment, answer, plane, schema=None).generate_and_push(VISIT, "grp", 0)
        assert classify(raised.value) is FailureKind.DATA
        assert (raised.value.sample, raised.value.response) == (2, "11 12 1")
        assert raised.value.cause == "WrongColumn: the column 'confidence' is not as declared"
        assert plane.count_samples(PARTITION) == 0

    async def test_rows_without_columns_of_their_own_are_as_before(self) -> None:
        environment = ScriptedEnvironment(1)
        plane = MemoryDataPlane()
        pushed = await manager(environment, answer, plane).generate_and_push(VISIT, "grp", 0)
        assert pushed.meta.fields == set(fields.ROLLOUT_FIELDS)
        assert not any({"metrics", "aggregations"} & tags.keys() for tags in pushed.meta.tags)


class Talking(MultiTurnEnvironment):
    """One turn with columns."""

    extra_columns = (ExtraColumn("generated", "per_token", "bool"), ExtraColumn("letters", "fixed", "int64"))

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt("1", "abc")] if split is Split.TRAIN else []

    async def step(self, prompt: Prompt, turns: Any) -> Done:
        return Done(1.0)

    def sample_columns(self, prompt: Prompt, turns: Any, segments: Any) -> dict[str, Any]:
        generated = [segment.generation is not None for segment in segments for _ in segment.token_ids]
        return {"generated": generated, "letters": len(turns[-1].response)}


class CountingTurns(Talking):
    """Its `turns` are a column, and the sum of them its metric."""

    extra_columns = (ExtraColumn("turns", "fixed", "int64", metric="sum"),)

    def sample_columns(self, prompt: Prompt, turns: Any, segments: Any) -> dict[str, Any]:
        return {"turns": 10 * len(turns)}


async def test_a_column_may_take_the_place_of_the_number_of_turns() -> None:
    environment = CountingTurns()
    found = await environment.run(environment.prompts(Split.TRAIN)[0], Talker(lambda text: "four").handle())
    checked = with_columns(found, declared_columns(environment), "talking", "g_g0")
    assert checked.metrics == {"turns": 10.0}


class TalkingOnce(SingleTurnEnvironment):
    """The same for a single turn."""

    name = "once"
    extra_columns = Talking.extra_columns

    def __init__(self, pool: RewardPool) -> None:
        super().__init__(pool)

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt("1", "abc")] if split is Split.TRAIN else []

    def score(self, prompt: Prompt, response: str) -> float:
        return 1.0

    def sample_columns(self, prompt: Prompt, response: str, segments: Any) -> dict[str, Any]:
        generated = [segment.generation is not None for segment in segments for _ in segment.token_ids]
        return {"generated": generated, "letters": len(response)}


class Unreadable(Talking):
    """Its declaration raises."""

    @property
    def extra_columns(self) -> Any:  # type: ignore[override]
        return 1 / 0


class Untyped(Talking):
    """Its declaration is a text."""

    extra_columns = "notes"  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["Talking", "TalkingOnce"])
async def test_the_base_classes_ask_for_them(name: str, tmp_path: Path) -> None:
    config = EnvironmentConfig(kind="custom", import_path=f"{HERE}:{name}")
    environment = make_environment(config, DataConfig(), seed=0)
    assert declared_columns(environment) == Talking.extra_columns
    found = await environment.run(environment.prompts(Split.TRAIN)[0], Talker(lambda text: "four").handle())
    checked = with_columns(found, declared_columns(environment), "talking", "g_g0")
    mask = [segment.generation is not None for segment in found.segments for _ in segment.token_ids]
    assert checked.columns["generated"].tolist() == mask
    assert checked.columns["letters"].item() == 4
    assert found.row_length == len(mask)
    await environment.close()
