"""How many prompts a data file has, without reading more of it than that takes."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Literal

from penstock.config.sections.data import DataConfig
from penstock.rollout.dataset_records import records_of


def count_records(data: DataConfig, part: Literal["train", "eval"], at_most: int | None = None) -> int:
    """Records at `data.train_path` or `data.eval_path`, counted up to `at_most`; 0 if there is no path.

    Raises the same errors as reading the prompts does.
    """
    path = data.train_path if part == "train" else data.eval_path
    if path is None:
        return 0
    form = data.format_of(path)
    if form == "jsonl" and Path(path).is_file():
        with Path(path).open("rb") as lines:
            return sum(1 for _ in itertools.islice((line for line in lines if line.strip()), at_most))
    if form == "parquet" and Path(path).is_file():
        from pyarrow import parquet

        rows = int(parquet.read_metadata(path).num_rows)
        return rows if at_most is None else min(rows, at_most)
    with closing(records_of(data, path, part, at_most)) as records:
        return sum(1 for _ in itertools.islice(records, at_most))
