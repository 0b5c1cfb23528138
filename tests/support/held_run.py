"""The `penstock` command, of which no group after the first N is generated: `-m tests.support.held_run N ARGUMENTS`."""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from typing import Any

from penstock.cli.main import main
from penstock.rollout.manager import PushedGroup, RolloutManager


def hold_groups_after(most: int) -> None:
    """However fast the machine is, a run that needs more groups than that does not end by itself."""
    generate, begun = RolloutManager.generate_and_push, count(1)

    async def held(self: RolloutManager, *args: Any) -> PushedGroup:
        if next(begun) > most:
            await asyncio.Event().wait()
        return await generate(self, *args)

    RolloutManager.generate_and_push = held  # type: ignore[method-assign]


if __name__ == "__main__":
    hold_groups_after(int(sys.argv.pop(1)))
    main()
