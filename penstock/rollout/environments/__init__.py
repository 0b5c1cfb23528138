"""Environments: where prompts come from and how responses get their reward.

An environment drives a generation handle and returns a trajectory. It never sees engines, tensors or other samples.
"""
