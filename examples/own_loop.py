"""A training loop of your own, from public names: engine, reward, advantages, split step and weight sync.

The model learns to answer a letter with that letter, over and over. A group is trained as soon as its responses are
scored, while the engine generates the others. Usage: python examples/own_loop.py [STEPS] [MODEL_FOLDER]
"""

import asyncio
import random
import sys

import torch
from tiny_model import save_tiny_model
from transformers import AutoTokenizer

import penstock

LETTERS, GROUPS, GROUP_SIZE = "abcd", 8, 8


def reward(letter: str, response: str) -> float:
    """How much of the response is the letter that was asked for, from 0 to 1."""
    return response.count(letter) / max(len(response), 1)


async def train(folder: str, steps: int) -> list[float]:
    """Train the model in `folder`; gives the mean reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = penstock.MemoryDataPlane()
    engine = penstock.EmbeddedEngine.from_pretrained(folder, max_num_seqs=GROUPS * GROUP_SIZE, max_model_len=16)
    settings = penstock.TrainingConfig.model_validate({"optimizer": {"lr": 3e-3}})
    trainer = penstock.LocalTrainer.from_pretrained(folder, rows, training=settings)
    weights = penstock.WeightSynchronizer([engine])
    sampling = penstock.SamplingParams(max_new_tokens=6, stop_token_ids=frozenset({tokenizer.eos_token_id}))
    rng, means = random.Random(0), []

    async def scored_group(name: str) -> tuple[penstock.KVBatchMeta, torch.Tensor]:
        """A prompt and its responses, scored: rows that can be trained, and their rewards."""
        letter = rng.choice(LETTERS)
        prompt = tuple(tokenizer(f"{letter}:")["input_ids"])
        requests = [
            penstock.GenerationRequest(f"{name}-{i}", prompt, sampling, seed=rng.getrandbits(32), group_id=name)
            for i in range(GROUP_SIZE)
        ]
        responses = await asyncio.gather(*map(engine.generate, requests))
        texts = [tokenizer.decode(response.token_ids, skip_special_tokens=True) for response in responses]
        rewards_G = torch.tensor([reward(letter, text) for text in texts])
        advantages_G = penstock.grpo_advantages(rewards_G)
        return await penstock.put_group(rows, name, prompt, responses, rewards_G, advantages_G), rewards_G

    for step in range(steps):
        await trainer.begin_train_step(step)
        step_rewards = []
        for group in asyncio.as_completed([scored_group(f"{step}-{i}") for i in range(GROUPS)]):
            meta, rewards_G = await group
            await trainer.train_microbatch(step, meta)  # adds to the step's gradients
            await rows.clear_samples_async(meta.sample_ids, meta.partition_id)
            step_rewards.append(rewards_G)
        done = await trainer.finish_train_step(step)  # divides by the step's tokens, clips, updates
        await weights.publish(await trainer.publish_weights())
        means.append(torch.cat(step_rewards).mean().item())
        print(f"step {step + 1}: reward {means[-1]:.2f}, weight version {done.version}")
    await trainer.close()
    await engine.close()
    return means


if __name__ == "__main__":
    model = sys.argv[2] if len(sys.argv) > 2 else save_tiny_model("runs/own-loop-model")
    asyncio.run(train(model, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 60))
