"""The `embedded` engine: continuous batching of one Hugging Face causal LM, in this process, on a CPU or one GPU.

`engine` is the asynchronous face and owns the thread; `scheduler` decides who sits in which slot and runs the decode
steps; `rows` holds what is known of each running request; `runner` calls the model with the caches of `slot_cache`
through the attention of `attention`; `prefills` shares prompts; `sampling` draws tokens; `weight_update` takes over new
weights. Knows nothing of groups beyond equal prompts, and nothing of rewards, buffers or trainers.
"""

from penstock.rollout.engines.embedded.engine import EmbeddedEngine
from penstock.rollout.engines.embedded.requests import InvalidRequest

__all__ = ["EmbeddedEngine", "InvalidRequest"]
