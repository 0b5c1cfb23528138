"""Closing what a run writes about itself, while somebody is in a hurry."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

from penstock.run.directory import RunDirectory
from penstock.run.run_log import RunLog
from tests.run.conftest import ConfigMaker
from tests.support.loggers import Remembering, waiting_in


async def test_cancelling_again_and_again_only_ends_the_wait_for_loggers(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    directory, stuck = RunDirectory(tmp_path / "run"), threading.Event()
    log = RunLog(make_config(), directory, [Remembering("stuck", waiting_in("close", stuck))])
    log.open()
    await log.start()
    lent = log._loggers._lock
    closing = asyncio.create_task(log.close("max_steps"))
    await asyncio.sleep(0)
    with lent:  # the loggers' own closing cannot end while this is held
        for _ in range(3):
            closing.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not closing.done()
    summary = await asyncio.wait_for(closing, 60)
    assert summary["stopped_by"] == "max_steps"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["logger"] for event in events if event["event"] == "logger_failed"] == ["stuck"]
    stuck.set()
    directory.close()
