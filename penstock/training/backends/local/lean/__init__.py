"""The body of a Llama-family model in fewer operations, for training small models on a CPU.

`body` decides where it fits and runs it; `places` says which tokens are computed; `layer`, `attention` and `norms` are
the arithmetic, with gradients written out. They know tensors only: no microbatches, no losses, no optimizer.
"""
