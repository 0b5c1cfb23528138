"""Turns of a conversation: single-turn and multi-turn environments, chat templates between turns, tool calls."""
