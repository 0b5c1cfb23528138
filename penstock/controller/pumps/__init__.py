"""The long-lived asyncio tasks of the controller, and what only they use: rollout, advantage, train, weight sync.

A pump knows the parts it works with, never how they were built.
"""
