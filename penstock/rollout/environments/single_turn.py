"""Single-turn environments: one prompt, one response, one score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory, checked_reward
from penstock.rollout.environments.reward_pool import RewardPool
from penstock.rollout.prompts import Prompt


class SingleTurnEnvironment(ABC):
    """Subclasses give prompts and a `score`; it is called in the reward pool, so it may be slow or hang."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    @property
    @abstractmethod
    def name(self) -> str:
        """For metrics and messages."""

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The dataset."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str) -> object:
        """The reward of a response; anything that is not a finite number counts as a failure."""

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Generate once, score once."""
        prompt_ids = handle.encode_prompt(prompt.content)
        generation = await handle.generate(prompt_ids)
        response = handle.decode(generation.token_ids)
        reward = checked_reward(await self._pool.score(self.score, prompt, response), prompt)
        return Trajectory((Segment(prompt_ids), Segment(generation.token_ids, generation)), reward, response)

    async def close(self) -> None:
        """End the reward pool."""
        await self._pool.close()
