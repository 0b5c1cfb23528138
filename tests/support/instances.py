"""Instances of any class that crosses, made from its type hints; and whether two of them are the same."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import importlib
import inspect
import math
import pkgutil
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import reject
from hypothesis import strategies as st

import penstock
from penstock.config.reading.yaml_limits import DialectError
from penstock.config.sections.base import Section
from penstock.data_plane.adapters.shm.messages import ShmAddress
from penstock.data_plane.field_spec import DTYPES as FIELD_DTYPES
from penstock.data_plane.field_spec import FieldKind, FieldSpec
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.observing.client import ObservedAddress, Watching
from penstock.error_form import RemoteError
from penstock.errors import EngineError, PenstockError
from penstock.runtime.wire.crossing import field_names, marked_classes
from penstock.weights.publication import DTYPE_BYTES, WeightManifest, lay_out

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
"""Halves of surrogate pairs included."""
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.binary(max_size=8))
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(TEXT, inner, max_size=3)
    ),
    max_leaves=6,
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def import_everything() -> None:
    """Every module of the package, so that all marked classes are known.

    A GPU's kernels cannot be imported without Triton; nothing in them crosses.
    """
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise


def classes_that_cross() -> list[type]:
    import_everything()
    return [kind for kind in marked_classes() if kind.__module__.startswith("penstock.")]


def all_settings() -> list[type[Section]]:
    import_everything()
    return sorted(_below(Section), key=lambda kind: (kind.__module__, kind.__qualname__))


def all_errors() -> list[type[Exception]]:
    import_everything()
    found = {kind for kind in _below(Exception) if kind.__module__.startswith("penstock.")} - _below(RemoteError)
    found -= {RemoteError, DialectError}  # made from others
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


def _below(kind: type) -> set[type]:
    direct = type.__subclasses__(kind)
    return set(direct).union(*map(_below, direct)) if direct else set()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = (torch.arange(math.prod(shape)) - 2).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.mT if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return np.arange(math.prod(shape)).reshape(shape).astype(draw(st.sampled_from(["<i4", "<f8", "?", "<u2"])))


@st.composite
def _metas(draw: st.DrawFn) -> KVBatchMeta:
    rows = draw(st.integers(0, 3))
    each = {"min_size": rows, "max_size": rows}
    return KVBatchMeta(
        draw(TEXT),
        tuple(draw(st.lists(TEXT, **each))),
        draw(st.frozensets(TEXT, max_size=3)),
        tuple(draw(st.lists(st.integers(0, 99), **each))),
        tuple(draw(st.lists(st.dictionaries(TEXT, PLAIN, max_size=2).map(types.MappingProxyType), **each))),
        draw(st.none() | TEXT),
        draw(st.dictionaries(TEXT, PLAIN, max_size=2)),
    )


WITH_INVARIANTS: dict[type, Any] = {
    KVBatchMeta: _metas(),
    FieldSpec: st.builds(FieldSpec, TEXT, st.just(FieldKind.FIXED), st.sampled_from(sorted(FIELD_DTYPES))),
}
"""Classes whose fields depend on each other."""
WITH_INVARIANTS[ObservedAddress] = st.deferred(
    lambda: st.builds(ObservedAddress, instances(ShmAddress), instances(Watching))
)
WITH_INVARIANTS[WeightManifest] = st.lists(
    st.tuples(TEXT, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    max_size=4,
    unique_by=lambda tensor: tensor[0],
).map(lay_out)


def instances(kind: type) -> st.SearchStrategy[Any]:
    """Instances of a marked class."""
    if kind in WITH_INVARIANTS:
        return WITH_INVARIANTS[kind]  # type: ignore[no-any-return]
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    hints = typing.get_type_hints(kind)
    names = [
        name for name in field_names(kind) if not dataclasses.is_dataclass(kind) or kind.__dataclass_fields__[name].init
    ]
    return _made(kind, st.fixed_dictionaries({name: of_type(hints[name]) for name in names}))


@st.composite
def _made(draw: st.DrawFn, kind: type, values: st.SearchStrategy[dict[str, Any]]) -> Any:
    given = draw(values)
    try:
        return kind(**given)
    except (PenstockError, ValueError):  # its own checks
        reject()


def settings_instances(kind: type[Section]) -> st.SearchStrategy[Any]:
    """Settings with values of the right kinds, whether or not the rules allow them together."""
    values = {name: of_type(field.annotation) for name, field in kind.model_fields.items()}
    given = st.sets(st.sampled_from(sorted(values)))
    return st.tuples(given, st.fixed_dictionaries(values)).map(lambda pair: kind.model_construct(pair[0], **pair[1]))


def errors(kind: type[Exception]) -> st.SearchStrategy[Any]:
    """Errors, made as the class's own callers make them."""
    maker = next(base for base in kind.__mro__ if "__init__" in vars(base))
    if not maker.__module__.startswith("penstock."):
        return TEXT.map(kind)
    hints = typing.get_type_hints(maker.__init__)
    named = {name: of_type(hints[name]) for name in inspect.signature(maker).parameters}
    return st.fixed_dictionaries(named).map(lambda values: kind(**values))


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return PLAIN
    if origin is typing.Annotated:
        return of_type(arguments[0])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(of_type, arguments))
    if origin is tuple:
        return st.lists(of_type(arguments[0]), max_size=10).map(tuple) if arguments[1:] == (...,) else _fixed(arguments)
    if origin in (collections.abc.Mapping, dict):
        plain = st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
        return plain if origin is dict else plain | plain.map(types.MappingProxyType)
    if origin in (list, collections.abc.Sequence):
        return st.lists(of_type(arguments[0]), max_size=10)
    if origin in (frozenset, set):
        return st.lists(of_type(arguments[0]), max_size=3).map(origin)
    if origin is np.ndarray:
        return arrays()
    if hint is torch.Tensor:
        return tensors()
    if hint is str:
        return TEXT
    if isinstance(hint, type) and issubclass(hint, Path):
        return st.sampled_from([Path("a/b"), Path("/")])
    if isinstance(hint, type) and issubclass(hint, BaseException):
        return st.builds(lambda kind, text: kind(text), st.sampled_from([ValueError, EngineError, OSError]), TEXT)
    if isinstance(hint, type) and issubclass(hint, Section):
        return settings_instances(hint)
    if hint in marked_classes():
        return instances(hint)
    return st.from_type(hint)  # type: ignore[no-any-return]


def _fixed(arguments: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.tuples(*map(of_type, arguments))


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same to the last bit, fields that `==` leaves out included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        raw = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (one, other)]
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in raw]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (
            one == other or (math.isnan(one) and math.isnan(other))
        )
    if isinstance(one, BaseException):
        return str(one) == str(other) and same(one.args, other.args)
    if isinstance(one, Section):
        return one.model_fields_set == other.model_fields_set and same(dict(one), dict(other))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, name), getattr(other, name)) for name in field_names(type(one)))
    if isinstance(one, dict | types.MappingProxyType):
        return len(one) == len(other) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
