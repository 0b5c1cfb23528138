"""The progress of a run for programs: one JSON object a line, with its `type`."""

from __future__ import annotations

from typing import TextIO

from penstock.observe.console import RecordKind, SilentView
from penstock.observe.jsonl import json_line
from penstock.observe.progress import Metrics


class JsonLinesView(SilentView):
    """Writes what `metrics.jsonl` gets, as it happens; `type` says whether it is of a `step` or an `eval`.

    Each line is written in one call, so that a stream that cannot take it loses it whole.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._closed = False

    def on_record(self, kind: RecordKind, record: Metrics) -> None:
        """Write its line."""
        if not self._closed:
            self._stream.write(json_line({"type": kind, **record}))

    def close(self) -> None:
        """Write no more."""
        self._closed = True
