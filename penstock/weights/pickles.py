"""Pickled files: opening one runs any code in it, so Penstock never opens one and refuses each by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import SetupError

_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_INDEX = ".safetensors.index.json"
_ADAPTER = "adapter_model"
_SHOWN = 3


def is_pickle(name: str) -> bool:
    """Whether files of this name are pickles, judging by the suffix."""
    return name.lower().endswith(_SUFFIXES)


def refuse_pickled_weights(folder: Path, key: str) -> None:
    """Raise `SetupError` if the weights of a model or adapter folder, named by `key`, would be read from a pickle.

    A pickle next to safetensors is ignored: nothing opens it.
    """
    named = _named_weights(folder)
    found = [name for name in named if is_pickle(name)]
    if not found and not any(folder.glob("*.safetensors")):
        found = sorted(path.name for path in folder.iterdir() if is_pickle(path.name))
    if not found and (folder / f"{_ADAPTER}.bin").exists() and not (folder / f"{_ADAPTER}.safetensors").exists():
        found = [f"{_ADAPTER}.bin"]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise SetupError(
            f"{key}: the weights in {str(folder)!r} are pickled ({', '.join(found[:_SHOWN])}{more}), and opening a "
            "pickle can run arbitrary code; if you trust them, convert them to safetensors (save_pretrained does)"
        )


def _named_weights(folder: Path) -> list[str]:
    """Weight files that the folder's own files point to."""
    named = [_read(folder / "config.json").get("transformers_weights")]
    for index in folder.glob(f"*{_INDEX}"):
        shards = _read(index).get("weight_map")
        named += sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
    return [name for name in named if isinstance(name, str)]


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty for a file that holds none: the code that loads the file reports what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
