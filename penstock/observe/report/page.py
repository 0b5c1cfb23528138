"""The page as a whole: sections in order, style and script inside, nothing from outside."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from penstock.observe.report.data import RunData
from penstock.observe.report.headline import headline
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.sections_data_plane import data_plane_section
from penstock.observe.report.sections_environment import environment_section
from penstock.observe.report.sections_events import events_section
from penstock.observe.report.sections_learning import optimisation_section, other_metrics, reward_section, section
from penstock.observe.report.sections_origin import origin
from penstock.observe.report.sections_samples import samples_section
from penstock.observe.report.sections_time import staleness_section, throughput_section, time_section

_TRACE_HELP = (
    "The whole timeline is in trace.json: every prompt group, pump, engine and trainer. Open it in Perfetto "
    "(ui.perfetto.dev, “Open trace file”; the file stays on your machine) or in chrome://tracing."
)


def render_page(data: RunData) -> str:
    """The report as one HTML document."""
    style, script = _resource("page.css"), _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # No matter what a response holds, a browser runs only the page's own script and fetches nothing.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{data.folder.name} – Penstock report"),
        tag("style", Html(style)),
    )
    learned = [
        reward_section(data) or _without_steps(data, "reward", "Reward"),
        environment_section(data),
        time_section(data) or _without_steps(data, "time", "Where the time goes"),
        staleness_section(data) or _without_steps(data, "staleness", "Staleness"),
        optimisation_section(data) or _without_steps(data, "optimisation", "Optimisation"),
        throughput_section(data) or _without_steps(data, "throughput", "Throughput and responses"),
        data_plane_section(data),
        samples_section(data) or _without_steps(data, "samples", "Sample responses"),
    ]
    happened = [events_section(data)]
    # For a run that trained nothing, the first thing to read is why.
    sections = [*(learned + happened if data.steps else happened + learned), _settings_section(data)]
    toggle = tag("button", "Theme", type="button", class_="theme", title="light, dark, or the system's setting")
    body = tag(
        "body",
        tag("div", toggle, class_="corner"),
        headline(data),
        tag("main", *sections),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _without_steps(data: RunData, name: str, title: str) -> Html:
    """A line for a section that needs steps when there are none; other empty sections are left out."""
    return NOTHING if data.steps else section(name, title, tag("p", "No step has finished.", class_="note"))


def _settings_section(data: RunData) -> Html:
    files = [
        path.name
        for path in sorted(data.folder.iterdir())
        if path.suffix in (".json", ".jsonl", ".yaml", ".png") and path.is_file()
    ]
    config = (
        tag("details", tag("summary", "config.yaml, as the run resolved it"), tag("pre", data.config_text))
        if data.config_text
        else NOTHING
    )
    trace = tag("p", _TRACE_HELP) if data.trace is not None else NOTHING
    listing = tag("p", "Files in ", tag("code", data.folder.name), ": ", ", ".join(files), ".", class_="note")
    return section("settings", "Settings and files", join([origin(data), config, other_metrics(data), trace, listing]))


def _resource(name: str) -> str:
    return resources.files("penstock.observe.report").joinpath(name).read_text(encoding="utf-8")
