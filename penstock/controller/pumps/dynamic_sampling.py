"""Dynamic sampling: groups whose samples all have the same reward are replaced, not trained, up to a bound."""

from __future__ import annotations

from penstock.config.sections.algorithm import DynamicSamplingConfig
from penstock.controller.pumps.advantage import ScoredChunk
from penstock.errors import TooManyFiltered


class DynamicSampling:
    """Chooses which groups of a chunk to replace; keeps no state.

    Example, `max_filtered_per_step` 3: a step that has replaced 2 groups gets a chunk with 2 flat ones. One of them is
    replaced; the other, being over the bound, is trained (`on_limit: train`) or ends the run (`stop`).
    """

    def __init__(self, config: DynamicSamplingConfig) -> None:
        self._config = config

    def choose(self, chunk: ScoredChunk, step: int, filtered: int) -> frozenset[str]:
        """The groups to replace, given that the step (counted from 1) has replaced `filtered` so far."""
        if not self._config.enabled:
            return frozenset()
        flat = chunk.flat_groups()
        room = self._config.max_filtered_per_step - filtered
        if len(flat) > room and self._config.on_limit == "stop":
            raise TooManyFiltered(
                f"step {step} would replace {filtered + len(flat)} groups without reward spread, more than "
                f"algorithm.dynamic_sampling.max_filtered_per_step = {self._config.max_filtered_per_step}: the prompts "
                "are too easy or too hard for the current model. Raise the limit, set on_limit to train, or use other "
                "prompts"
            )
        return frozenset(flat[:room])
