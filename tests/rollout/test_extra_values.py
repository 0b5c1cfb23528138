"""What a sample may give for the columns that its environment declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WrongColumn
from penstock.rollout.environments import (
    ExtraColumn,
)
from penstock.rollout.extra_values import with_columns
from tests.rollout.test_extra_columns import ALL, FEATURES, HINTS, NOTES, PER_TOKEN, trajectory, values


class TestValues:
    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("confidence", [0.5] * 3, r"the shape \[3\], not \[4\]; its row has 4 tokens, prompt included"),
            ("confidence", [[0.5] * 4], r"the shape \[1, 4\], not \[4\]"),
            ("confidence", torch.zeros(4, dtype=torch.float64), "the dtype float64"),
            ("confidence", "many", "'many', which is not made of numbers"),
            ("confidence", None, "None, which is not made of numbers"),
            ("features", np.zeros((2, 3)), "the dtype float64"),
            ("features", torch.zeros(3, 2), r"the shape \[3, 2\], not \[2, 3\]"),
            ("hints", 1.5, "1.5, which int64 cannot hold"),
            ("confidence", [0.5] * 3 + [1e39], r"1e\+39.*, which float32 cannot hold"),
            ("confidence", [0.5] * 3 + [1j], "which float32 cannot hold"),
            ("hints", [1], r"the shape \[1\], not \[\]"),
            ("hints", torch.tensor(1, dtype=torch.int32), "the dtype int32"),
            ("notes", {"a": {1, 2}}, "a set; text, None, and lists"),
            ("notes", torch.zeros(2), "a torch.Tensor; text, None, and lists"),
        ],
    )
    def test_a_value_of_another_form_is_a_failure_that_names_everything(self, name: str, value: Any, why: str) -> None:
        with pytest.raises(WrongColumn, match=f"^game: sample group7_g2: the column '{name}' is declared as .*{why}"):
            with_columns(trajectory(values(4, **{name: value})), ALL, "game", "group7_g2")

    def test_a_missing_value_is_a_failure_that_names_everything(self) -> None:
        given = values(4)
        del given["hints"]
        with pytest.raises(WrongColumn, match=r"^game: sample g_g1 has no value for the column 'hints' .fixed int64.,"):
            with_columns(trajectory(given), ALL, "game", "g_g1")

    def test_a_value_that_nobody_declared_is_a_failure(self) -> None:
        with pytest.raises(WrongColumn, match=r"^game: sample g_g1 has the column 'more', which .* does not declare"):
            with_columns(trajectory(values(4, more=1)), ALL, "game", "g_g1")
        with pytest.raises(WrongColumn, match="'more'"):
            with_columns(trajectory({"more": 1}), (), "game", "g_g1")

    def test_columns_that_are_no_mapping_are_a_failure(self) -> None:
        with pytest.raises(WrongColumn, match="its columns are list, not a mapping"):
            with_columns(trajectory([1]), ALL, "game", "g_g1")  # type: ignore[arg-type]

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_a_metric_must_be_finite(self, number: float) -> None:
        column = ExtraColumn("score", "fixed", "float32", metric="max")
        with pytest.raises(WrongColumn, match=f"but has {number}; a metric must be a finite number"):
            with_columns(trajectory({"score": number}), (column,), "game", "g_g1")

    def test_a_number_is_not_measured_twice(self) -> None:
        with pytest.raises(WrongColumn, match="has 'hints' twice, as a metric and as a column that is one"):
            with_columns(trajectory(values(4), metrics={"hints": 1.0}), ALL, "game", "g_g1")

    def test_a_sample_without_an_optional_value_holds_what_stands_for_it(self) -> None:
        optional = (
            replace(PER_TOKEN, optional=True, missing=-1.0),
            replace(FEATURES, optional=True),
            replace(HINTS, optional=True, missing=7),
            replace(NOTES, optional=True),
        )
        found = with_columns(trajectory({}, metrics={"turns": 2.0}), optional, "game", "g_g1")
        assert found.columns["confidence"].tolist() == [-1.0] * 4
        assert found.columns["features"].tolist() == [[0.0] * 3] * 2
        assert (found.columns["hints"].item(), found.columns["hints"].dtype) == (7, torch.int64)
        assert found.columns["notes"] is None
        assert found.metrics == {"turns": 2.0}, "it does not count in the metric"

    def test_the_environment_may_use_its_memory_again(self) -> None:
        array, tensor = np.ones((2, 3), dtype=np.float32), torch.ones(4)
        found = with_columns(trajectory(values(4, features=array, confidence=tensor)), ALL, "game", "g_g1")
        array[:], tensor[:] = 5.0, 5.0
        assert found.columns["features"].tolist() == [[1.0] * 3] * 2
        assert found.columns["confidence"].tolist() == [1.0] * 4

    @pytest.mark.parametrize(
        ("dtype", "number"),
        [
            ("float16", 70_000),
            ("bfloat16", 1e39),
            ("float8_e4m3fn", 500.0),
            ("float8_e4m3fn", float("inf")),
            ("complex64", 1e39 + 0j),
        ],
    )
    def test_a_number_that_its_dtype_makes_infinite_is_a_failure(self, dtype: str, number: float) -> None:
        column = ExtraColumn("own", "fixed", dtype)
        with pytest.raises(WrongColumn, match=f"which {dtype} cannot hold"):
            with_columns(trajectory({"own": number}), (column,), "game", "g_g0")

    @pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e-30])
    def test_a_number_that_is_only_rounded_or_not_finite_anyway_is_kept(self, number: float) -> None:
        column = ExtraColumn("own", "fixed", "float16")
        found = with_columns(trajectory({"own": number}), (column,), "game", "g_g0").columns["own"]
        assert torch.equal(found, torch.tensor(number, dtype=torch.float16)) or found.isnan()

    @settings(max_examples=60, deadline=None)
    @given(
        st.sampled_from(["float64", "float32", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from(["per_token", "fixed"]),
        st.integers(1, 5),
        st.booleans(),
    )
    def test_numbers_tensors_and_arrays_of_any_form_come_out_as_they_went_in(
        self, dtype: str, shape: tuple[int, ...], kind: Any, length: int, as_list: bool
    ) -> None:
        full = (length, *shape) if kind == "per_token" else shape
        tensor = torch.arange(int(np.prod(full))).remainder(2).reshape(full).to(getattr(torch, dtype))
        given = tensor.tolist() if as_list and tensor.numel() else tensor
        column = ExtraColumn("own", kind, dtype, shape=shape)
        found = with_columns(trajectory({"own": given}, length), (column,), "game", "g_g0").columns["own"]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
