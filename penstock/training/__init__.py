"""The split train step: its state machine and `StepWorker`, the trainer's interface, packing, objective, log-probs.

`backends/` is how a step is computed, `workers/` what the controller calls. Trainers fetch rows from the data plane by
key. Nothing here knows about the controller, the buffer or the engines.
"""
