"""Responses of the model with their rewards, for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.observe.report.data import Record, RunData
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import short
from penstock.observe.report.sections_learning import section
from penstock.observe.report.values import number

MOST_PROMPT, MOST_RESPONSE = 1500, 4000
"""Characters of a text that are shown."""


def samples_section(data: RunData) -> Html:
    """Cards, the newest first; a script sorts and filters them."""
    chosen, total = data.samples.shown, data.samples.total
    if not chosen:
        return NOTHING
    lead = f"{total:,} responses were kept in samples.jsonl, chosen independently of their reward."
    if len(chosen) < total:
        lead += f" This page shows {len(chosen)}, spread over the run, with the best and the worst among them."
    several = len({str(sample.get("environment", "")) for sample in chosen}) > 1
    cards = [_card(sample, several) for sample in chosen]
    body = [
        _controls(chosen),
        tag("div", *cards, class_="cards"),
        tag("button", "Show more", type="button", class_="more", hidden=True),
    ]
    return section("samples", "Sample responses", join(body), lead)


def _controls(samples: Sequence[Record]) -> Html:
    steps = sorted({int(number(sample.get("step")) or 0) for sample in samples}, reverse=True)
    options = [tag("option", "all steps", value="")] + [tag("option", f"step {step}", value=step) for step in steps]
    orders = [
        tag("option", name, value=value)
        for value, name in (
            ("newest", "newest first"),
            ("oldest", "oldest first"),
            ("best", "best"),
            ("worst", "worst"),
        )
    ]
    return tag(
        "div",
        tag("label", "Order ", tag("select", *orders, name="order")),
        tag("label", "Step ", tag("select", *options, name="step")),
        tag("span", class_="count note"),
        class_="controls sample-controls",
        hidden=True,
    )


def _card(sample: Record, several: bool) -> Html:
    reward, step = number(sample.get("reward")), int(number(sample.get("step")) or 0)
    facts = [
        tag("span", tag("b", short(reward)), " reward", class_="reward"),
        tag("span", f"step {step}"),
        tag("span", f"advantage {short(number(sample.get('advantage')))}"),
        tag("span", f"lag {short(number(sample.get('lag')))}"),
        tag("span", f"{short(number(sample.get('length')))} tokens") if "length" in sample else None,
        tag("span", "truncated", class_="flag") if sample.get("truncated") else None,
        tag("span", sample.get("environment", "")) if several else None,
        tag("span", f"prompt {sample.get('prompt_id', '')}"),
        *_numbers(sample.get("components"), "reward/"),
        *_numbers(sample.get("metrics"), ""),
    ]
    return tag(
        "article",
        tag("header", *facts),
        tag("div", tag("h3", "Prompt"), _text(sample.get("rendered_prompt") or sample.get("prompt"), MOST_PROMPT)),
        tag("div", tag("h3", "Response"), _text(sample.get("response"), MOST_RESPONSE)),
        class_="card",
        data_step=step,
        data_reward=reward if reward is not None else "",
    )


def _numbers(values: object, prefix: str) -> list[Html]:
    """What the reward is made of, or what the environment measured."""
    named = values.items() if isinstance(values, Mapping) else ()
    return [tag("span", f"{prefix}{name} {short(number(value))}") for name, value in named]


def _text(value: object, most: int) -> Html:
    """A text with its white space, cut with a mark if it is too long for a page."""
    whole = "" if value is None else str(value)
    if not whole:
        return tag("pre", tag("span", "(empty)", class_="note"))
    rest = len(whole) - most
    mark = tag("span", f" … {rest:,} more characters are in samples.jsonl", class_="cut") if rest > 0 else None
    return tag("pre", whole[:most], mark)
