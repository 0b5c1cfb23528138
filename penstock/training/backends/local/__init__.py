"""The `local` backend: a plain torch module on the CPU or one GPU.

`backend` computes; `policy` turns microbatches into log-probs, `optimizer` owns gradients and moments, `checkpointing`
writes and reads both; `lean` has layers for small models on a CPU. Nothing outside this folder knows how any of them
computes.
"""

from penstock.training.backends.local.backend import LocalBackend as LocalBackend
