"""`math`: answers checked by the math-verify package, over a dataset of problems with reference answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

from penstock.config.reading.environment_args import MathArgs
from penstock.errors import EnvironmentTimeout, SetupError
from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory, checked_reward
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.rewards.scores import failures_about
from penstock.rollout.environments.tasks.math_grading import grade
from penstock.rollout.prompts import Prompt


class MathEnvironment:
    """One response per prompt. Sympy can run forever on what a model writes, so grading belongs in processes."""

    def __init__(
        self, args: MathArgs, pool: RewardPool, *, train: Sequence[Prompt], held_out: Sequence[Prompt]
    ) -> None:
        self._rewards = {"correct": args.correct, "wrong": args.wrong, "unparsed": args.unparsed}
        self._undecided = args.undecided
        self._pool = pool
        self._prompts = {Split.TRAIN: train, Split.EVAL: held_out}
        for key, prompts in (("train", train), ("eval", held_out)):
            for prompt in prompts:
                if not _is_reference(prompt.answer):
                    raise SetupError(
                        f"data.{key}_path: prompt {prompt.prompt_id} has no reference answer, as text or number; "
                        "data.answer_key names the column that holds it"
                    )

    @property
    def name(self) -> str:
        return "math"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[split]

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Generate once, grade once."""
        prompt_ids = handle.encode_prompt(prompt.content)
        generation = await handle.generate(prompt_ids)
        response = handle.decode(generation.token_ids)
        with failures_about(response):
            reward = checked_reward(await self._reward(prompt, response), prompt)
        return Trajectory((Segment(prompt_ids), Segment(generation.token_ids, generation)), reward, response)

    async def close(self) -> None:
        """End the pool."""
        await self._pool.close()

    async def _reward(self, prompt: Prompt, response: str) -> float:
        try:
            outcome = await self._pool.score(grade, reference_text(prompt.answer), response)
        except EnvironmentTimeout:
            if self._undecided is None:
                raise
            return self._undecided
        return self._rewards[outcome]


def _is_reference(answer: object) -> bool:
    if isinstance(answer, bool):
        return False
    if isinstance(answer, float):
        return math.isfinite(answer)
    return isinstance(answer, int) or (isinstance(answer, str) and answer != "")


def reference_text(answer: str | float) -> str:
    """A reference as text; numbers with all their digits, since an exponent would be read as the number e."""
    return format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer)
