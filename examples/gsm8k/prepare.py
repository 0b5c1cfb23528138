"""Writes the recipe's data: `data/train.jsonl` and `data/test.jsonl`, one prompt with its answer per line.

    python prepare.py path/to/gsm8k      # a folder with train.jsonl and test.jsonl, as GSM8K is published
    python prepare.py --download         # openai/gsm8k from the Hugging Face hub; needs the extra `data`

A record of GSM8K is `{"question": ..., "answer": "... #### 72"}`. A record of ours is
`{"id": "train-0", "prompt": ..., "answer": "72"}`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

INSTRUCTION = "Reason step by step, and put your final answer in \\boxed{}."


def converted(records: Iterable[Mapping[str, str]], split: str) -> Iterator[dict[str, str]]:
    """GSM8K's records as prompts with their final answers."""
    for number, record in enumerate(records):
        _, mark, answer = record["answer"].rpartition("####")
        if not mark:
            raise SystemExit(f"{split}: record {number} has no final answer after ####: {record['answer'][-60:]!r}")
        yield {
            "id": f"{split}-{number}",
            "prompt": f"{record['question'].strip()}\n\n{INSTRUCTION}",
            "answer": answer.strip().replace(",", ""),
        }


def from_folder(folder: Path, split: str) -> list[dict[str, str]]:
    """The records of one file of GSM8K as it is published."""
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        raise SystemExit(f"{file} does not exist; GSM8K has the files train.jsonl and test.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def from_hub(split: str) -> Iterable[Mapping[str, str]]:
    """The records of one split on the hub."""
    from datasets import load_dataset

    records: Iterable[Mapping[str, str]] = load_dataset("openai/gsm8k", "main", split=split)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description="Write data/train.jsonl and data/test.jsonl for the GSM8K recipe.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", nargs="?", type=Path, help="a folder with GSM8K's train.jsonl and test.jsonl")
    source.add_argument("--download", action="store_true", help="fetch openai/gsm8k from the Hugging Face hub")
    parser.add_argument("--to", type=Path, default=Path("data"), help="the folder to write to")
    chosen = parser.parse_args()
    chosen.to.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        records = from_hub(split) if chosen.download else from_folder(chosen.folder, split)
        lines = [json.dumps(record, ensure_ascii=False) for record in converted(records, split)]
        (chosen.to / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{chosen.to / f'{split}.jsonl'}: {len(lines):,} prompts")


if __name__ == "__main__":
    main()
