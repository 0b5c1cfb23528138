"""The `embedded` engine: continuous batching of one Hugging Face causal LM, in this process, on a CPU or one GPU.

`engine` is the asynchronous face, `worker` its thread; `scheduler` decides who sits in which slot and runs the decode
steps; `requests` and `rows` hold what is known of each request; `runner` calls the model, on the keys and values of
`slot_cache`, through `attention` and, for the Llama family, `fused` on matrices `merged` in a `workspace`; `prefills`
shares prompts; `sampling` draws tokens; `weight_update` takes over new weights; `supported` refuses models that none of
this fits. `choice` takes another way on a GPU, for the models it fits: the kernels and CUDA graphs of `device`. Knows
nothing of groups beyond equal prompts, and nothing of rewards, buffers or trainers.
"""

from penstock.rollout.engines.embedded.engine import EmbeddedEngine
from penstock.rollout.engines.embedded.requests import InvalidRequest

__all__ = ["EmbeddedEngine", "InvalidRequest"]
