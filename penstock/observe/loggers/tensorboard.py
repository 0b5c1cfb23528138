"""Event files for TensorBoard, written with TensorBoard's own messages and record format; needs no TensorFlow.

TensorBoard's `EventFileWriter` is not used: it imports TensorFlow if that is installed, which takes seconds and prints
messages, and it starts its own thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.sections.observe import TensorboardConfig
from penstock.errors import SetupError
from penstock.observe.loggers.base import Outcome, RunInfo, Setting, needs


class TensorboardLogger:
    """Scalars by step, the settings as hyper-parameters and as text, the summary as text."""

    name = "tensorboard"

    def __init__(self, config: TensorboardConfig) -> None:
        self._config = config
        self._step = 0

    def start(self, run: RunInfo) -> str:
        """Open an event file and write the settings."""
        with needs("observe.tensorboard", "tensorboard>=2.15"):
            from tensorboard.summary.writer.record_writer import RecordWriter
        folder = Path(self._config.folder) if self._config.folder is not None else run.folder / "tensorboard"
        name = f"events.out.tfevents.{int(time.time()):010d}.{uuid.uuid4().hex[:12]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("xb")
        except OSError as error:
            raise SetupError(f"observe.tensorboard.folder: {str(folder)!r} cannot be written: {error}") from error
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write_values([_session_start(run.settings), _text("config", _table(run.settings))])
        return str(folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all scalars of the step; if it comes again, TensorBoard drops what it had from there on."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        if step < self._step:
            self._write(step=step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        self._step = step
        value = summary_pb2.Summary.Value
        self._write_values([value(tag=key, simple_value=number) for key, number in metrics.items()], step)

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        """The end of the session in the table of hyper-parameters, and the summary as text."""
        rows = {"status": outcome.value, **values}
        self._write_values([_session_end(outcome), _text("summary", _table(rows))], int(values.get("steps") or 0))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_values(self, values: list[Any], step: int = 0) -> None:
        from tensorboard.compat.proto import summary_pb2

        self._write(step=step, summary=summary_pb2.Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        self._records.write(event_pb2.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


def _session_start(settings: Mapping[str, Setting]) -> Any:
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for key, value in settings.items():
        if isinstance(value, bool):
            info.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[key].number_value = value
        else:
            info.hparams[key].string_value = value
    return _hparams(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info))


def _session_end(outcome: Outcome) -> Any:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if outcome is Outcome.FINISHED else api_pb2.STATUS_FAILURE
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _hparams(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata

    described = metadata.create_summary_metadata(data)
    return summary_pb2.Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2
    from tensorboard.plugins.text import metadata

    described = metadata.create_summary_metadata(display_name=tag, description="")
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
    return summary_pb2.Summary.Value(tag=tag, metadata=described, tensor=tensor)


def _table(rows: Mapping[str, Any]) -> str:
    """A Markdown table; a bar or a line break inside a value would end its cell."""
    lines = [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(["| name | value |", "| --- | --- |", *lines])


def _cell(value: Any) -> str:
    return " ".join(str(value).splitlines()).replace("|", "\\|")
