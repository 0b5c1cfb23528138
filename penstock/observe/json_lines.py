"""The progress of a run for programs: one JSON object per line, with its `type`."""

from __future__ import annotations

from typing import TextIO

from penstock.observe.console import RecordKind, SilentView
from penstock.observe.jsonl import json_line
from penstock.observe.progress import Metrics


class JsonLinesView(SilentView):
    """Writes what `metrics.jsonl` gets, as it happens; `type` says whether it is for a `step` or an `eval`.

    Each line is written in one call, so a stream that cannot accept it loses all of it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._closed = False

    def on_record(self, kind: RecordKind, record: Metrics) -> None:
        """Write its line."""
        if not self._closed:
            self._stream.write(json_line({"type": kind, **record}))

    def close(self) -> None:
        """Stop writing."""
        self._closed = True
