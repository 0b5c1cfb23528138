"""Which of a run's samples the report shows, chosen while they are read."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.observe.report.values import number

MOST_SAMPLES = 240
_EXTREMES = 40
"""How many of the best and of the worst are always shown."""
_SPREAD = MOST_SAMPLES - 2 * _EXTREMES

_Placed = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True)
class SampleChoice:
    """The samples that are shown, newest first, and how many there are in all."""

    shown: tuple[Mapping[str, Any], ...]
    total: int


def choose_samples(samples: Iterable[Mapping[str, Any]]) -> SampleChoice:
    """All samples or, if there are very many, some spread evenly over the run, the newest, the best and the worst.

    Holds a few hundred at a time: the spread ones are every `stride`-th, and when there are too many of them, every
    other one is dropped and the stride doubles. While there are few, all are kept.
    """
    spread: list[_Placed] = []
    best: list[tuple[float, int, Mapping[str, Any]]] = []
    worst: list[tuple[float, int, Mapping[str, Any]]] = []
    stride, newest = 1, None
    for place, sample in enumerate(samples):
        newest = (place, sample)
        reward = number(sample.get("reward")) or 0.0
        _keep(best, (reward, place, sample))
        _keep(worst, (-reward, place, sample))
        if place % stride == 0:
            spread.append(newest)
        if len(spread) > 2 * MOST_SAMPLES:
            spread, stride = spread[::2], 2 * stride
    chosen = dict(spread)
    if newest is not None and newest[0] >= MOST_SAMPLES:
        chosen = dict((*_evenly(spread), newest)) | {at: sample for _, at, sample in (*best, *worst)}
    return SampleChoice(tuple(chosen[at] for at in sorted(chosen, reverse=True)), newest[0] + 1 if newest else 0)


def _keep(heap: list[tuple[float, int, Mapping[str, Any]]], entry: tuple[float, int, Mapping[str, Any]]) -> None:
    """Keep the largest; places differ, so samples are never compared."""
    if len(heap) < _EXTREMES:
        heapq.heappush(heap, entry)
    elif entry > heap[0]:
        heapq.heapreplace(heap, entry)


def _evenly(placed: list[_Placed]) -> list[_Placed]:
    most = _SPREAD - 1
    return [placed[k * (len(placed) - 1) // (most - 1)] for k in range(most)]
