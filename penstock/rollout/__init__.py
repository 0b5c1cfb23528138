"""Generation of prompt groups: the RolloutManager, engines, environments and rewards.

Writes rows into the data plane and returns metadata. Knows nothing of trainers or of the controller's pumps.
"""
