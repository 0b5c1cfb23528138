"""The split train step: its state machine, the trainer's interface, workers, packing and log-probs.

Trainers fetch rows from the data plane by key. Nothing here knows of the controller, the buffer or the engines.
"""
