"""Valid configurations, and seeded ways to spoil them: their values, their structure, the bytes of their YAML."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.models import RunConfig
from penstock.config.reading.keys import all_keys
from penstock.config.reading.yaml_dialect import write_yaml
from tests.support.odd_values import MISBEHAVING, NAMES, NUMBERS, SNIPPETS, TEXTS

Settings = dict[str, Any]


def valid_settings(folder: Path) -> list[Settings]:
    """Configurations that `penstock config check` finds nothing wrong with; their files go to `folder`."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).touch()
    lines = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(4))
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    recorded = folder / "recorded" / "rollouts"
    recorded.mkdir(parents=True)
    same = {"group_size": 4, **{f"sampling.{k}": v for k, v in _SAMPLING.items()}}
    info = {"format": 1, "settings": {f"rollout.{key}": value for key, value in same.items()}, "tokenizer": "x"}
    (recorded / "recording.json").write_text(json.dumps(info), encoding="utf-8")
    common = {"run_dir": str(folder / "run"), "seed": 3, "model": {"path": str(model)}}
    return [_merged(common, settings) for settings in _variants(folder)]


_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 8}


def _variants(folder: Path) -> list[Settings]:
    data = {"train_path": str(folder / "train.jsonl"), "eval_path": str(folder / "eval.jsonl")}
    return [
        {
            "data": {"train_size": 8, "eval_size": 2, "epochs": 2, "shuffle": False},
            "rollout": {"environment": {"kind": "reasoning_gym:chain_sum", "args": {"min_terms": 2, "max_terms": 3}}},
            "staleness": {"policy": "windowed", "max_staleness": 2},
            "algorithm": {"correction": {"kind": "tis"}},
            "training": {"prompt_groups_per_step": 4, "max_steps": 3, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "weight_sync": {"mode": "in_flight"},
        },
        {
            "data": {**data, "prompt_key": "prompt", "answer_key": "answer", "format": "jsonl"},
            "rollout": {
                "environment": {"kind": "function", "import_path": "tests.support.rewards:length", "workers": 2},
                "failure": {"max_dropped_prompts": 1, "on_drop": "shrink", "min_groups_per_step": 1},
            },
            "staleness": {"policy": "in_order", "lookahead": 1},
            "buffer": {"max_buffered_groups": 64},
            "observe": {"tensorboard": {"folder": str(folder / "tb")}, "prometheus": {"port": 0}},
        },
        {
            "rollout": {
                "environment": {
                    "kind": "custom",
                    "import_path": f"{MISBEHAVING}.names:Environment",
                    "args": {"size": 2},
                },
                "sampling": {"max_new_tokens": 4},
            },
            "staleness": {
                "policy": "custom",
                "import_path": "penstock.buffer.samplers.windowed:Windowed",
                "args": {"max_staleness": 1, "over_sampling": True},
            },
            "model": {"lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}},
            "checkpoint": {"every_steps": 2, "keep_latest": 1},
        },
        {
            "data": {"train_size": 8, "eval_size": 2},
            "rollout": {"environment": {"kind": "calculator", "args": {"operators": ["+"], "max_terms": 2}}},
            "eval": {"every_steps": 1},
            "deterministic": True,
            "staleness": {"policy": "in_order", "lookahead": 0},
            "weight_sync": {"mode": "drain"},
        },
        {
            "rollout": {
                "environment": {"kind": "reasoning_gym:chain_sum"},
                "replay_from": str(folder / "recorded"),
                "group_size": 4,
                "sampling": _SAMPLING,
            },
            "eval": {"at_start": False, "at_end": False},
            "training": {"early_stop": {"metric": "train/reward_mean", "patience": 2}},
        },
    ]


def _merged(first: Settings, second: Settings) -> Settings:
    result = copy.deepcopy(first)
    for key, value in second.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) else copy.deepcopy(value)
    return result


def misleading_values(folder: Path) -> dict[str, list[Any]]:
    """By key, values of the right type that only a look at files, modules and tasks can find wrong, or right."""
    files = [str(path) for path in _odd_files(folder)]
    return {
        "run_dir": [*files, str(folder / "train.jsonl" / "below"), "/proc/none", "/dev/null/x", ".", "runs/new"],
        "model.path": [*files, str(folder / "none"), "nobody/nothing", "./none", "~/none", str(folder)],
        "data.train_path": files,
        "data.eval_path": files,
        "data.prompt_key": ["answer", "nothing", "", "\0"],
        "data.answer_key": ["nothing", "prompt", "\u202e"],
        "rollout.replay_from": [*files, str(folder), str(folder / "none")],
        "rollout.group_size": [1, 2, 10**30],
        "rollout.environment.import_path": NAMES,
        "rollout.environment.kind": [f"reasoning_gym:{task}" for task in _TASKS],
        "rollout.environment.args": [{name: value} for name in _ARGS for value in _ARG_VALUES],
        "staleness.import_path": NAMES,
        "staleness.args": [{}, {"max_staleness": None}, {"max_staleness": -1}, {"x": 1}, {"max_staleness": [[]]}],
        "staleness.lookahead": [0, 1, 3, 64, 10**30],
        "buffer.max_buffered_groups": [1, 2, 5, 10**30],
        "observe.tensorboard.folder": [*files, "/proc/none", "/dev/null/x"],
        "observe.prometheus": [{"host": host, "port": 0} for host in ("", ".", "::1", "x" * 300, "é" * 90)],
    }


_TASKS = ("chain_sum", "leg_counting", "basic_arithmetic", "letter_counting", "nope", "simple_equations", "\0")
_ARGS = ("min_terms", "max_terms", "min_digits", "max_digits", "size", "seed", "operators", "nope", "colour", "\0")
_ARG_VALUES: list[Any] = [-1, 0, 1, 2, 0.95, 50, True, None, "x", [], ["+"], {}, float("nan"), [[[]]], "\0", "-"]


def _odd_files(folder: Path) -> list[Path]:
    record = b'{"prompt": "1+1=", "answer": "2"}\n'
    contents = {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n\n",
        "marked.jsonl": b"\xef\xbb\xbf" + record,
        "utf16.jsonl": record.decode().encode("utf-16"),
        "invalid.jsonl": b'{"prompt": "\xff"}\n',
        "torn.jsonl": record[:20],
        "digits.jsonl": b'{"prompt": "x", "answer": ' + b"9" * 5000 + b"}\n",
        "deep.jsonl": b'{"prompt": "x", "answer": ' + b"[" * 300 + b"]" * 300 + b"}\n",
        "deeper.jsonl": b"[" * 100_000,
        "twice.jsonl": b'{"prompt": "x", "id": "\\ud800"}\n{"prompt": "x", "id": "\\ud801"}\n',
        "surrogate.jsonl": b'{"prompt": "\\ud800", "answer": {"\\udfff": ["\\ud800"]}}\n',
        "list.jsonl": b"[]\n",
        "chat.jsonl": b'{"prompt": [{"role": 1}]}\n',
        "null.jsonl": b"null\n",
        "no.parquet": record,
        "cut.parquet": b"PAR1" + b"\0" * 20,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    used = folder / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_bytes(b"[]\n")
    return [*(folder / name for name in contents), used, folder / "absent.jsonl"]


def misled(settings: Settings, values: dict[str, list[Any]], rng: random.Random) -> bytes:
    """The YAML of settings of which one or two have another value of the right type."""
    settings = copy.deepcopy(settings)
    present = [key for key in values if _holder(settings, key) is not None]
    for key in rng.sample(present, rng.choice((1, 1, 2))):
        holder = _holder(settings, key)
        assert holder is not None
        holder[key.rpartition(".")[2]] = rng.choice(values[key])
    return write_yaml(settings).encode("utf-8", "surrogatepass")


def _holder(settings: Settings, key: str) -> Settings | None:
    """The section that has the key; None where it is not set."""
    section: Any = settings
    *sections, name = key.split(".")
    for part in sections:
        section = section.get(part) if isinstance(section, dict) else None
    return section if isinstance(section, dict) and name in section else None


def mutated(settings: Settings, rng: random.Random) -> bytes:
    """The YAML of settings that were spoiled in one to three ways; now and then by a byte, or not at all."""
    settings = copy.deepcopy(settings)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice(_STRUCTURAL)(settings, rng)
    raw = write_yaml(settings).encode("utf-8", "surrogatepass")
    if rng.random() < 0.25:
        raw = rng.choice(_TEXTUAL)(raw, rng)
    return raw


def override(rng: random.Random) -> str:
    """Something in the place of `key=value`."""
    key = rng.choice(_KEYS)
    value = rng.choice([*TEXTS, *map(str, NUMBERS), *SNIPPETS]).replace("\0", "")
    other = (key, value.lstrip("-"), f"={value}", f"{key}.x.y={value}")
    return f"{key}={value}" if rng.random() < 0.9 else rng.choice(other)


def _places(settings: Settings) -> list[tuple[Any, Any]]:
    """Every container with each of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    todo: list[Any] = [settings]
    while todo:
        container = todo.pop()
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(pairs):
            found.append((container, key))
            if isinstance(value, dict | list):
                todo.append(value)
    return found


def _odd_value(rng: random.Random) -> Any:
    return rng.choice(
        (
            lambda: None,
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(TEXTS),
            lambda: rng.choice(NAMES),
            lambda: [],
            lambda: {},
            lambda: [rng.choice(NUMBERS), rng.choice(TEXTS)],
            lambda: {rng.choice(TEXTS): rng.choice(TEXTS)},
            lambda: _nested(rng.choice((3, 20, 45, 60, 200))),
        )
    )()


def _nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def _change_value(settings: Settings, rng: random.Random) -> None:
    container, key = rng.choice(_places(settings))
    container[key] = _odd_value(rng)


def _change_leaf(settings: Settings, rng: random.Random) -> None:
    """A value of the right kind and a wrong size, so that the mutation gets past the types."""
    leaves = [(c, k) for c, k in _places(settings) if not isinstance(c[k], dict | list)]
    container, key = rng.choice(leaves)
    if isinstance(container[key], str):
        container[key] = rng.choice(NAMES if ":" in container[key] else TEXTS)
    else:
        container[key] = rng.choice(NUMBERS)


def _drop_key(settings: Settings, rng: random.Random) -> None:
    container, key = rng.choice(_places(settings))
    del container[key]


def _misspell_key(settings: Settings, rng: random.Random) -> None:
    container, key = rng.choice([(c, k) for c, k in _places(settings) if isinstance(k, str)])
    at = rng.randrange(len(key) + 1)
    container[key[:at] + rng.choice(("x", "", "_", "\0", "é", "\ud800", ".")) + key[at + 1 :]] = container.pop(key)


def _add_key(settings: Settings, rng: random.Random) -> None:
    *sections, name = rng.choice(_KEYS).split(".")
    section = settings
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return
    section[name] = _odd_value(rng)


def _move_section(settings: Settings, rng: random.Random) -> None:
    (one, a), (two, b) = rng.choice(_places(settings)), rng.choice(_places(settings))
    two[b] = copy.deepcopy(one[a])


def _damage_bytes(raw: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(raw)
    for _ in range(rng.choice((1, 1, 3, 20))):
        damaged[rng.randrange(len(damaged))] = rng.choice(
            (0, 9, 10, 13, 32, 38, 42, 58, 91, 123, 128, 255, rng.randrange(256))
        )
    return bytes(damaged)


def _put_snippet(raw: bytes, rng: random.Random) -> bytes:
    """In the place of a value."""
    lines = raw.decode("utf-8", "replace").splitlines()
    at = rng.choice([place for place, line in enumerate(lines) if ":" in line] or [0])
    lines[at] = f"{lines[at].partition(':')[0]}: {rng.choice(SNIPPETS)}"
    return "\n".join(lines).encode("utf-8", "replace")


def _double_line(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])


def _cut_short(raw: bytes, rng: random.Random) -> bytes:
    return raw[: rng.randrange(len(raw))]


def _other_encoding(raw: bytes, rng: random.Random) -> bytes:
    return raw.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32-le")))


_KEYS = sorted(set(all_keys(RunConfig)))
_STRUCTURAL: list[Callable[[Settings, random.Random], None]] = [
    *(_change_leaf, _change_leaf, _change_leaf, _change_value, _change_value),
    *(_drop_key, _misspell_key, _add_key, _add_key, _move_section),
]
_TEXTUAL = [_damage_bytes, _put_snippet, _put_snippet, _put_snippet, _double_line, _cut_short, _other_encoding]
