"""Where tensors live between producers and consumers: rollout workers write rows, trainer ranks fetch them by key.

The controller passes `KVBatchMeta` around and never the tensors. Nothing outside `adapters/` knows which system stores
the rows; nothing in here knows what the rows mean to an algorithm.
"""
