"""Whole runs with several engine ranks in processes of their own: kill -9, SIGSTOP, joining and leaving."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.errors import EngineError, WeightSyncError
from penstock.rollout.fleet import EngineFleet, RankState
from penstock.rollout.manager import PushedGroup, RolloutManager
from tests.run.conftest import ConfigMaker
from tests.run.test_resume import LETTERS, ends, lines, write_prompts
from tests.support.processes import send, wait_until_gone

PROMPTS = 48


@pytest.fixture
def config(make_config: ConfigMaker, tmp_path: Path) -> Any:
    """A run of several steps whose every prompt is to be trained."""

    def make(**changes: Any) -> RunConfig:
        return make_config(
            **{
                "data": {"train_path": write_prompts(tmp_path, PROMPTS)},
                "rollout.environment": LETTERS,
                "rollout.engine.ranks": 2,
                "rollout.failure": {"backoff_seconds": 0},
                "training.max_steps": None,
                "runtime.engine_process": True,
                "runtime.timeouts": {"silence_seconds": 3.0},
                "eval": {"at_start": False, "at_end": False},
            }
            | changes
        )

    return make


class Watched:
    """The fleet of the run under test, and what is done to it while it trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleets: list[EngineFleet] = []
        self.pids: dict[str, list[int]] = {}
        made = EngineFleet.__init__

        def noting(fleet: EngineFleet, *args: Any, **options: Any) -> None:
            made(fleet, *args, **options)
            self.fleets.append(fleet)

        monkeypatch.setattr(EngineFleet, "__init__", noting)

    @property
    def fleet(self) -> EngineFleet:
        return self.fleets[-1]

    def pid(self, name: str) -> int:
        return self.fleet.rank_stats()[name].process

    def train(self, config: RunConfig, blow: Callable[[], None], after_steps: int = 2) -> penstock.RunResult:
        """Train; the blow falls in another thread once that many steps are done."""
        metrics, over = Path(config.run_dir) / "metrics.jsonl", threading.Event()

        def wait_and_strike() -> None:
            while not over.wait(0.02):
                if metrics.exists() and metrics.read_text(encoding="utf-8").count("train/loss") >= after_steps:
                    blow()
                    return

        striking = threading.Thread(target=wait_and_strike, daemon=True)
        striking.start()
        try:
            return penstock.train(config)
        finally:
            over.set()
            striking.join(30)


def check_every_prompt_ended_once(run_dir: Path) -> None:
    assert ends(run_dir) == Counter({(0, str(number)): 1 for number in range(1, PROMPTS + 1)})
    assert {line["end"] for line in lines(run_dir / "ledger.jsonl") if "end" in line} == {"trained"}


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "events.jsonl") if line["event"] in names]


def check_back_at_the_right_version(run_dir: Path, name: str) -> None:
    """The event log tells of the loss and the return, at the version that was served at that moment."""
    story = events(run_dir, "engine_lost", "engine_replaced", "weights_published")
    served, lost = 0, False
    for event in story:
        if event["event"] == "weights_published":
            served = event["version"]
        elif event["event"] == "engine_lost":
            assert event["engine"] == name
            lost = True
        else:
            assert lost
            assert (event["engine"], event["version"]) == (name, served)
            return
    raise AssertionError(f"{name} did not come back: {story}")


def hold_new_groups_until_it_is_back(watched: Watched, name: str, struck: list[int], patch: pytest.MonkeyPatch) -> None:
    """However fast the machine, the run must not be over before the rank has come back."""
    generate = RolloutManager.generate_and_push

    async def held(self: RolloutManager, *args: Any) -> PushedGroup:
        while struck and watched.pid(name) in (struck[0], 0):  # noqa: ASYNC110 - the rank is looked at
            await asyncio.sleep(0.02)
        while struck and watched.fleet.rank(name).state is not RankState.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return await generate(self, *args)

    patch.setattr(RolloutManager, "generate_and_push", held)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "number"), [(2, signal.SIGKILL), (3, signal.SIGKILL), (2, signal.SIGSTOP), (1, signal.SIGKILL)]
)
def test_a_rank_that_is_killed_or_stopped_is_replaced_while_the_run_goes_on(
    config: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, number: signal.Signals
) -> None:
    watched, name, struck = Watched(monkeypatch), f"embedded-{ranks - 1}", list[int]()

    def strike() -> None:
        struck.append(watched.pid(name))
        send(struck[0], number)

    if ranks > 1:
        hold_new_groups_until_it_is_back(watched, name, struck, monkeypatch)
    result = watched.train(config(**{"rollout.engine.ranks": ranks}), strike)
    assert result.stopped_by == "data_exhausted"
    check_every_prompt_ended_once(result.run_dir)
    wait_until_gone(struck[0])
    wait_until_gone(watched.pid(name))
    assert events(result.run_dir, "rollout_retried", "prompt_dropped", "run_failed", "left_behind") == []
    check_back_at_the_right_version(result.run_dir, name)


@pytest.mark.long
def test_without_replacements_the_loss_of_the_only_rank_ends_the_run_and_it_can_be_resumed(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    settings = config(**{"rollout.engine.ranks": 1, "rollout.failure": {"engine_replacements": 0}})
    with pytest.raises((EngineError, WeightSyncError), match="was ended by SIGKILL"):
        watched.train(settings, lambda: send(watched.pid("embedded-0"), signal.SIGKILL))
    penstock.resume(Path(settings.run_dir))
    check_every_prompt_ended_once(Path(settings.run_dir))


@pytest.mark.long
def test_without_replacements_the_other_rank_takes_over(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    settings = config(**{"rollout.failure": {"engine_replacements": 0}})
    result = watched.train(settings, lambda: send(watched.pid("embedded-0"), signal.SIGKILL))
    check_every_prompt_ended_once(result.run_dir)
    assert [event["engine"] for event in events(result.run_dir, "engine_lost", "engine_not_replaced")] == [
        "embedded-0",
        "embedded-0",
    ]


@pytest.mark.long
def test_a_deterministic_run_has_the_same_losses_with_any_ranks_and_with_one_killed(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def losses(name: str, blow: Callable[[], None] | None, **changes: Any) -> list[tuple[float, ...]]:
        settings = config(
            **{
                "run_dir": str(tmp_path / name),
                "deterministic": True,
                "staleness": {"policy": "in_order", "lookahead": 0},
                "weight_sync.mode": "drain",
                "training.min_groups_per_chunk": 2,
                **changes,
            }
        )
        run_dir = watched.train(settings, blow or (lambda: None)).run_dir
        keys = ("train/loss", "train/grad_norm", "train/reward_mean")
        return [tuple(line[key] for key in keys) for line in lines(run_dir / "metrics.jsonl") if "train/loss" in line]

    watched = Watched(monkeypatch)
    alone = losses("alone", None, **{"runtime.engine_process": False, "rollout.engine.ranks": 1})
    assert any(norm > 0 for _, norm, _ in alone)
    assert losses("threads", None, **{"runtime.engine_process": False}) == alone
    assert losses("killed", lambda: send(watched.pid("embedded-1"), signal.SIGKILL)) == alone
