"""`math`: answers checked by the math-verify package, over a dataset of problems with reference answers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.environment_args import MathArgs
from penstock.errors import SetupError
from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory, checked_reward
from penstock.rollout.environments.math_grading import grade
from penstock.rollout.environments.process_pool import ProcessRewardPool
from penstock.rollout.prompts import Prompt


class MathEnvironment:
    """One response per prompt. Sympy can run for ever on what a model writes, so grading happens in processes."""

    def __init__(
        self, args: MathArgs, pool: ProcessRewardPool, *, train: Sequence[Prompt], held_out: Sequence[Prompt]
    ) -> None:
        self._rewards = {"correct": args.correct, "wrong": args.wrong, "unparsed": args.unparsed}
        self._pool = pool
        self._prompts = {Split.TRAIN: train, Split.EVAL: held_out}
        for key, prompts in (("train", train), ("eval", held_out)):
            for prompt in prompts:
                if not isinstance(prompt.answer, str | int | float) or prompt.answer == "":
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
        outcome = await self._pool.score(grade, str(prompt.answer), response)
        reward = checked_reward(self._rewards[outcome], prompt)
        return Trajectory((Segment(prompt_ids), Segment(generation.token_ids, generation)), reward, response)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()
