"""Reward functions: how they are called, where they run, what they may return, and what their errors say.

The worker processes import as little as possible: they start in a fraction of a second.
"""
