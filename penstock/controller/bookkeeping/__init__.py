"""What the controller writes down: groups and their ends, the ledger of prompts, snapshots, the trace, statistics of a
step, kept samples.

Nothing in here decides what happens next, but for one rule: the prompt of a group that ends as too stale comes back.
"""
