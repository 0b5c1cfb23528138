"""The split train step: its state machine, the trainer's interface, workers, packing, log-probs, and `lean` layers.

Trainers fetch rows from the data plane by key. Nothing here knows about the controller, the buffer or the engines.
"""
