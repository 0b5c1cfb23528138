"""A page with the newest value of every metric, for a Prometheus server to read."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock import __version__
from penstock.config.sections.observe import PrometheusConfig
from penstock.errors import SetupError
from penstock.observe.loggers.base import MetricName, Outcome, RunInfo, needs


class PrometheusLogger:
    """Gauges `penstock_<section>_<name>`, the counter `penstock_events_total`, and facts about the run.

    Has its own registry: runs that share a process do not see each other's metrics. The page is up from start to close;
    requests are served by threads that read one immutable mapping, which `log` replaces as a whole.
    """

    name = "prometheus"

    def __init__(self, config: PrometheusConfig, event_counts: Callable[[], Mapping[str, int]]) -> None:
        self._config = config
        self._event_counts = event_counts
        self._newest: Mapping[MetricName, float] = {}
        self._info: dict[str, str] = {}
        self._started = 0.0

    def start(self, run: RunInfo) -> str:
        """Listen."""
        with needs("observe.prometheus", "prometheus-client>=0.20"):
            from prometheus_client import CollectorRegistry, start_http_server
        self._info = {
            "run": run.name,
            "version": __version__,
            "model": str(run.settings.get("model.path", "")),
            "environment": str(run.settings.get("rollout.environment.kind", "")),
        }
        self._started = time.time()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(self._config.port, self._config.host, registry)
        except OSError as error:
            raise SetupError(refusal(self._config, error)) from error
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self._server.server_port}/metrics"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the values; labels that a metric no longer has, such as a lag that no group had, are removed."""
        new = {MetricName.parse(key): value for key, value in metrics.items()}
        renewed = {(name.base, name.label) for name in new}
        kept = {name: value for name, value in self._newest.items() if (name.base, name.label) not in renewed}
        self._newest = {**kept, **new, MetricName("step"): float(step)}

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        """The page ends with the run; there is nobody left to read it."""

    def close(self) -> None:
        """Stop listening; ends the server's thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """What the page shows; called by the registry for every request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

        yield InfoMetricFamily("penstock_run", "The run", value=self._info)
        yield GaugeMetricFamily("penstock_run_start_time_seconds", "When the run began", value=self._started)
        events = CounterMetricFamily("penstock_events", "Events since the start of the run", labels=["event"])
        for event, count in self._event_counts().items():
            events.add_metric([event], count)
        yield events
        families: dict[str, Any] = {}
        for name, value in self._newest.items():
            gauge = gauge_name(name.base)
            family = families.setdefault(gauge, Metric(gauge, name.base, "gauge"))
            family.add_sample(gauge, {name.label: name.value} if name.label else {}, value)
        yield from families.values()


def gauge_name(base: str) -> str:
    """`train/reward_mean` as `penstock_train_reward_mean`."""
    return "penstock_" + re.sub(r"[^a-zA-Z0-9_]", "_", base)


def refusal(config: PrometheusConfig, error: OSError | UnicodeError) -> str:
    """Why nothing can listen there, and what to do."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        advice = "is in use; choose another port, or 0 for a free one"
        return f"observe.prometheus.port: {config.port} on {config.host} {advice}"
    if code == errno.EACCES:
        return f"observe.prometheus.port: {config.port} may not be used by this user; choose one above 1023"
    return f"observe.prometheus.host: cannot listen on {config.host!r}: {error}"
