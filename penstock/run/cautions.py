"""What a run does not say by itself but a person should know beforehand: each a `key: reason` line."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.buffer.reach import groups_for_lag, reachable_lag
from penstock.config.models import RunConfig
from penstock.config.sections.staleness import CustomStaleness, InOrderStaleness, WeightFifoStaleness, WindowedStaleness

_RATIOLESS = ("reinforce",)
_WAYS_OUT = {
    "reinforce": "set algorithm.correction.kind to tis",
    "gspo": "set algorithm.correction.kind to sequence_masked, or algorithm.old_policy to engine",
}
_WAY_OUT = "set algorithm.correction.kind to tis, or algorithm.old_policy to engine"
"""What corrects for the lag, for losses not named above: not all corrections work with all losses."""


def uncorrected_staleness(config: RunConfig) -> Iterator[str]:
    """Groups may be older than the weights they train, and nothing in the loss accounts for it."""
    algorithm, policy = config.algorithm, config.staleness
    replays = config.rollout.replay_from is not None
    key = "rollout.replay_from" if replays else _window_key(config)
    if key is None or algorithm.correction.kind != "none" or algorithm.old_policy == "engine":
        return
    if config.training.backend == "none":
        return
    unbounded = replays or isinstance(policy, CustomStaleness)
    lag = "of any age" if unbounded else f"up to {_plural(_reached_lag(config), 'version')} old"
    if algorithm.loss.kind in _RATIOLESS:
        effect = f"the {algorithm.loss.kind} loss trains them as if the current weights had produced them"
    elif config.training.minibatches_per_step > 1:
        effect = (
            "the old policy is the trainer's own at the start of the step, so the ratio reflects only the step's own "
            "updates, not the lag"
        )
    else:
        effect = (
            "the loss takes the trainer's own log-probs at the start of the step for the old policy, so the ratio is "
            "exactly 1, nothing is ever clipped, and nothing corrects for the lag"
        )
    way_out = _WAYS_OUT.get(algorithm.loss.kind, _WAY_OUT)
    yield f"{key}: groups {lag} may be trained without a correction: {effect}; {way_out}"


def beginnings_cut(config: RunConfig) -> Iterator[str]:
    """A truncated prompt loses what a chat template puts first."""
    if config.data.overlong == "truncate_left" and config.data.chat_template and config.rollout.replay_from is None:
        yield (
            "data.overlong: truncate_left cuts the beginning of a prompt that is too long, which with "
            "data.chat_template holds the template's header and the system message; drop keeps prompts whole"
        )


def nothing_to_lose(config: RunConfig) -> Iterator[str]:
    """Restarts are for parts that can be lost without the run's own process."""
    if config.runtime.restarts and not config.runtime.trainer_process:
        yield (
            "runtime.restarts: never happens, because trainer and data plane are in the run's own process and end only "
            "with it; set runtime.trainer_process to true"
        )


def unreachable_window(config: RunConfig, data_steps: int | None) -> Iterator[str]:
    """The staleness policy allows a larger lag than the other settings let groups reach.

    `data_steps` is how many steps the data lasts for, if that is fewer than wanted.
    """
    window, key, n = largest_lag(config), _window_key(config), config.training.prompt_groups_per_step
    if key is None or not window:
        return
    policy = config.staleness
    if isinstance(policy, WeightFifoStaleness) and policy.lookahead < window:
        yield (
            f"{key}: a window of {window} is never reached, because nothing is dispatched more than "
            f"staleness.lookahead = {policy.lookahead} steps ahead; raise it to {window}, or lower the window"
        )
        return
    if data_steps is not None and data_steps - 1 < window:
        yield (
            f"{key}: a window of {window} is never reached, because the data lasts for {_plural(data_steps, 'step')}; "
            "raise data.epochs, or lower the window"
        )
        return
    if isinstance(policy, WindowedStaleness) and policy.order == "freshest":
        return  # a ready group may be passed over again and again: its age does not depend on how many there are
    room = config.buffer.max_buffered_groups
    enforced = isinstance(policy, InOrderStaleness)  # a buffer too small for its lookahead is an error already
    if not enforced and (reached := reachable_lag(room, n)) < window:
        yield (
            f"{key}: a window of {window} is not reached: buffer.max_buffered_groups = {room} holds "
            f"{_in_steps(room, n)}, so groups that end in order are at most {_plural(reached, 'version')} old; raise "
            f"it to {groups_for_lag(window, n)} or more, or lower the window"
        )
        return
    inflight = config.rollout.max_inflight_groups
    if (reached := reachable_lag(inflight, n)) < window:
        yield (
            f"{key}: a window of {window} is not used while the trainer waits for rollouts: "
            f"rollout.max_inflight_groups = {inflight} has {_in_steps(inflight, n)} in generation, which is at most "
            f"{_plural(reached, 'version')} ahead; raise it to {groups_for_lag(window, n)} or more, or lower the window"
        )


def largest_lag(config: RunConfig) -> int:
    """The largest lag that the policy lets a trained group have; 0 if it is not known."""
    match config.staleness:
        case WindowedStaleness() | WeightFifoStaleness():
            return config.staleness.max_staleness
        case InOrderStaleness():
            return config.staleness.lookahead
        case _:
            return 0


def _reached_lag(config: RunConfig) -> int:
    """The largest lag a trained group can have: that of the policy, or how far ahead it dispatches."""
    policy, lag = config.staleness, largest_lag(config)
    return min(lag, policy.lookahead) if isinstance(policy, WeightFifoStaleness) else lag


def _window_key(config: RunConfig) -> str | None:
    """The setting that lets groups be older than the weights they train; None if nothing does."""
    policy = config.staleness
    if isinstance(policy, CustomStaleness):
        return "staleness.import_path"
    if largest_lag(config) == 0 or (isinstance(policy, WeightFifoStaleness) and policy.lookahead == 0):
        return None
    return "staleness.lookahead" if isinstance(policy, InOrderStaleness) else "staleness.max_staleness"


def _in_steps(groups: int, groups_per_step: int) -> str:
    """A number of groups, as people compare it with a step."""
    whole, rest = divmod(groups, groups_per_step)
    if whole == 0:
        return "fewer groups than one step has"
    return f"the groups of {_plural(whole, 'step')}" + (f" and {rest} more" if rest else "")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
