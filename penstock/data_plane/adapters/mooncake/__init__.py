"""Mooncake, the store behind `transfer_queue` with backend `mooncake_cpu`: its master, its environment, its libraries.

Nothing in here knows TransferQueue or rows, and nothing imports Mooncake before it is needed.
"""
