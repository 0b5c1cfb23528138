"""Decoding on a GPU by kernels of the engine's own, a whole step as one CUDA graph.

`support` says for which models this works and builds it; `scheduler` keeps one step in flight; `decoder` holds what a
step reads and writes on the device, and `graphs` captures and replays steps; `layers` is the model's arithmetic around
the kernels of `row_kernels`, `attention_kernels` and `sampling_kernels`. Triton is imported by those three alone, and
they are imported only where decoding happens this way. Models and machines that do not fit take the plain path of
`embedded.runner`.
"""
