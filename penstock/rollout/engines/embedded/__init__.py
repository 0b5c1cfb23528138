"""The `embedded` engine: continuous batching of one Hugging Face causal LM, in this process, on a CPU or one GPU.

`engine` is the asynchronous interface, `worker` its thread; `scheduler` decides who sits in which slot and runs the
decode steps; `requests` and `rows` hold the state of each request; `runner` calls the model, on the keys and values of
`slot_cache`, through `attention` and, for the Llama family, `fused` on matrices `merged` in a `workspace`; `prefills`
shares prompts; `sampling` draws tokens; `weight_update` takes over new weights; `supported` refuses models that the
engine cannot serve. On a GPU, `choice` picks another path for models that fit it: the kernels and CUDA graphs of
`device`. Knows nothing of groups beyond equal prompts, and nothing of rewards, buffers or trainers.
"""

from penstock.rollout.engines.embedded.engine import EmbeddedEngine
from penstock.rollout.engines.embedded.requests import InvalidRequest

__all__ = ["EmbeddedEngine", "InvalidRequest"]
