"""Decoding on a GPU with the engine's own kernels, a whole step as one CUDA graph.

`support` says for which models this works and builds it; `scheduler` keeps one step in flight; `decoder` holds what a
step reads and writes on the device, and `graphs` captures and replays steps; `layers` is the model's arithmetic around
the kernels of `row_kernels`, `attention_kernels` and `sampling_kernels`. Only those three import Triton, and they are
imported only when decoding uses them. Models and machines that do not fit take the plain path of `embedded.runner`.
"""
