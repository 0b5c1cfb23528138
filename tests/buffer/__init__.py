"""Tests of the replay buffer and the samplers."""
