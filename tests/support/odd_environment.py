"""An environment that says, wherever it may say something, what no file takes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.rollout.environments import Done, MultiTurnEnvironment, Observation, Prompt, Split, Turn

ODD = "\ud800\0\x1b[31m\u2028"


class OddEnvironment(MultiTurnEnvironment):
    """Two turns a sample; the first prompt fails."""

    max_turns = 2

    @property
    def name(self) -> str:
        return f"odd{ODD}"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [
            Prompt(f"{ODD}{i}", f"{i}+1={ODD}", answer=[ODD], facts={ODD: {ODD: (ODD,)}})
            for i in range(12 if split is Split.TRAIN else 2)
        ]

    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        if prompt.prompt_id.endswith("10"):
            raise ValueError(ODD * 100_000)
        if len(turns) == 1:
            return Observation(f"go on{ODD}")
        return Done(float(len(turns[-1].response)))
