"""The records of a data file: JSONL, Parquet and what the `datasets` package reads.

Errors name a record's place in the data and the setting to change.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.config.sections.data import DataConfig
from penstock.errors import SetupError
from penstock.text import cut, error_text, safe

_INSTALL = "is not installed: pip install"
_DEFAULT_SPLITS = {"train": "train", "eval": "test"}
_PARQUET_BATCH = 4096
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Record:
    """One row of a dataset, and how a person finds it."""

    number: int
    """Counted from 1."""
    where: str
    values: Any


def records_of(
    data: DataConfig, path: str, part: Literal["train", "eval"], limit: int | None
) -> Generator[Record, None, None]:
    """The records at `path`, one after the other; close the iterator if you do not want all of them."""
    form = data.format_of(path)
    if form == "datasets":
        split = data.train_split if part == "train" else data.eval_split
        yield from _from_datasets(data, path, split, part)
        return
    file = Path(path)
    if not os.path.isfile(file):
        other = "is a folder, not a file" if os.path.isdir(file) else "is a device, not a file"
        raise SetupError(f"{path!r} {other}" if os.path.exists(file) else f"file {path!r} does not exist")
    yield from _from_jsonl(file) if form == "jsonl" else _from_parquet(file, limit)


def _from_jsonl(file: Path) -> Iterator[Record]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file}:{number}"
                if (text := _decoded(line, where, first=number == 1)).strip():
                    yield Record(number, where, _parse(text, where))
    except OSError as error:
        raise SetupError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error


def _decoded(line: bytes, where: str, *, first: bool) -> str:
    """A line as text; the mark that some editors put before UTF-8 is not part of it."""
    if first and line.startswith(_UTF16_MARKS):
        raise SetupError(f"{where}: the file is UTF-16 text; save it as UTF-8")
    try:
        return line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise SetupError(f"{where}: not UTF-8 text: byte 0x{line[error.start]:02x}; save the file as UTF-8") from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also an integer with more digits than Python reads
        raise SetupError(f"{where}: not JSON: {error_text(error)}") from error


def _from_parquet(file: Path, limit: int | None) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise SetupError(f"{str(file)!r} is read with pyarrow, which {_INSTALL} 'pyarrow>=15'") from error
    try:
        with parquet.ParquetFile(file) as table:
            # Read no more rows at once than requested: some hold images, or whole books.
            batches = table.iter_batches(batch_size=min(limit or _PARQUET_BATCH, _PARQUET_BATCH))
            yield from _numbered(itertools.chain.from_iterable(map(_rows, batches)), str(file))
    except (OSError, ArrowException) as error:
        raise SetupError(f"{str(file)!r} cannot be read as Parquet: {_first_line(error)}") from error


def _rows(batch: Any) -> Iterator[Any]:
    """The rows of a batch of Parquet, one at a time if one of them is not what the file says it is."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        for place in range(batch.num_rows):
            yield from batch.slice(place, 1).to_pylist()


def _from_datasets(data: DataConfig, path: str, split: str | None, part: Literal["train", "eval"]) -> Iterator[Record]:
    if os.path.isfile(path):
        raise SetupError(_no_dataset(data, path))
    try:
        import datasets
    except ImportError as error:
        raise SetupError(f"{path!r} is read with the datasets package, which {_INSTALL} 'datasets>=3'") from error
    with _quiet(datasets, offline=not data.download):
        if any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json")):
            rows = _load_saved(datasets, data, path, split, part)
        else:
            rows = _load_named(datasets, data, path, split or _DEFAULT_SPLITS[part], part)
    yield from _numbered(_read_one_by_one(rows, path), path)


def _read_one_by_one(rows: Iterable[Any], path: str) -> Iterator[Any]:
    try:
        yield from rows
    except UnicodeDecodeError:
        raise
    except Exception as error:  # the package reads files, and decodes what is in them, only as rows are asked for
        raise SetupError(f"{path!r} cannot be read: {_first_line(error)}") from error


def _no_dataset(data: DataConfig, path: str) -> str:
    if data.format == "datasets":
        return f"{path!r} is a file, and data.format = datasets reads folders and names; set it to jsonl or parquet"
    return (
        f"{path!r} ends neither in .jsonl nor in .parquet: if it is one of them, set data.format to jsonl or parquet; "
        "a folder with CSV or JSON files is read by the datasets package: give the folder instead"
    )


def _load_saved(datasets: Any, data: DataConfig, path: str, split: str | None, part: str) -> Iterable[Any]:
    if data.subset is not None:
        raise SetupError(f"{path!r} is a saved dataset, which has no subsets: remove data.subset")
    try:
        saved = datasets.load_from_disk(path)
    except Exception as error:  # the package may raise anything on files it cannot read
        raise SetupError(f"{path!r} cannot be read as a saved dataset: {_first_line(error)}") from error
    if not isinstance(saved, datasets.DatasetDict):
        if split is not None:
            raise SetupError(f"{path!r} is a saved dataset without splits: remove data.{part}_split")
        return saved  # type: ignore[no-any-return]
    wanted = split or _DEFAULT_SPLITS[part]
    if wanted not in saved:
        raise SetupError(f"{path!r} has no split {wanted!r}; set data.{part}_split to {one_of(wanted, list(saved))}")
    return saved[wanted]  # type: ignore[no-any-return]


def _load_named(datasets: Any, data: DataConfig, path: str, split: str, part: str) -> Iterable[Any]:
    try:
        return datasets.load_dataset(path, data.subset, split=split)  # type: ignore[no-any-return]
    except Exception as error:  # the package and the network below it may raise anything
        reason = _first_line(error)
        if os.path.isdir(path):
            hint = f"it is a folder, but not one that datasets can load: {reason}"
        elif data.download:
            hint = reason
        else:
            hint = f"it is not a local dataset ({reason}); set data.download=true to look for it on the hub"
        if "split" in reason.lower():
            hint += f" (data.{part}_split is {split!r})"
        raise SetupError(f"{path!r} cannot be loaded: {hint}") from error


@contextmanager
def _quiet(datasets: Any, *, offline: bool) -> Iterator[None]:
    """Without progress bars and, if asked, without network: the packages read these switches at each use."""
    import huggingface_hub.constants as hub

    bars = datasets.are_progress_bars_disabled()
    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    if offline:
        hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
        if not bars:
            datasets.enable_progress_bars()


def _numbered(rows: Iterable[Any], source: str) -> Iterator[Record]:
    number = 0
    try:
        for number, values in enumerate(rows, start=1):
            yield Record(number, f"{source}, row {number}", values)
    except UnicodeDecodeError as error:  # text is decoded only as rows are asked for
        raise SetupError(f"{source}, row {number + 1}: cannot be read: {_first_line(error)}") from error


def one_of(name: str, names: list[str]) -> str:
    """A name to use instead, for a message: the closest, and all there are."""
    close = difflib.get_close_matches(name, names, n=1)
    listed = cut(safe(", ".join(map(str, names))), 500) or "nothing: there are no columns"
    return f"{close[0]} (there are {listed})" if close else f"one of {listed}"


def _first_line(error: BaseException) -> str:
    lines = [line for line in error_text(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
