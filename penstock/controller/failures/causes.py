"""Why environments and rewards fail: each cause is reported once, with its traceback and an example, and counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from penstock.errors import EnvironmentFailure
from penstock.observe.events import EventLog
from penstock.rollout.prompts import Prompt
from penstock.text import cut, safe

_MOST_CAUSES = 200
"""How many causes are told apart; user code may create error classes as it runs."""
_LONGEST_PROMPT, _LONGEST_RESPONSE = 2_000, 4_000


class FailureCauses:
    """Knows the causes of a run's failures so far. Evaluations and rollouts share one.

    A cause is the error's type and the innermost line of user code; if nothing was raised, it is the reward function
    and what is wrong (`my_rewards:exact: returned None`).

    Worked example: a reward raises `KeyError` in line 12 for groups 3, 5 and 8. For group 3 there is an event
    `environment_failed` with the traceback, and `facts` gives `failed_by: "KeyError at …:12 in score"` and
    `failed_by_count: 1`; for groups 5 and 8 it gives the same with 2 and 3, and there is no further event.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._counts: Counter[str] = Counter()

    def facts(self, failure: BaseException, *, group_id: str, prompt: Prompt) -> dict[str, Any]:
        """What a failure's event says about its cause; empty if neither environment nor reward is involved."""
        if not isinstance(failure, EnvironmentFailure):
            return {}
        cause = failure.cause
        if cause not in self._counts:
            if len(self._counts) >= _MOST_CAUSES:
                return {}
            self._tell(failure, group_id, prompt)
        self._counts[cause] += 1
        return {"failed_by": cause, "failed_by_count": self._counts[cause]}

    def _tell(self, failure: EnvironmentFailure, group_id: str, prompt: Prompt) -> None:
        response = failure.response
        self._events.emit(
            "environment_failed",
            cause=failure.cause,
            message=str(failure),
            group_id=group_id,
            sample=failure.sample,
            prompt_id=prompt.prompt_id,
            prompt=cut(prompt.text, _LONGEST_PROMPT),
            response=None if response is None else cut(safe(response), _LONGEST_RESPONSE),
            traceback=None if failure.trace is None else failure.trace.traceback,
        )
