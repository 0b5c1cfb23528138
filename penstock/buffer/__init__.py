"""The replay buffer and the staleness policies that rule dispatch and selection.

Holds metadata only. Knows nothing of engines, trainers or the event pumps that call it.
"""
