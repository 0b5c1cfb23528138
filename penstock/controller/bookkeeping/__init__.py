"""What the controller writes down: the ledger of prompts, snapshots, the trace, statistics of a step, kept samples.

Nothing in here decides what happens next.
"""
