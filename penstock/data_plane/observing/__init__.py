"""What is known about the use of a data plane: one event per operation, totals, latencies, bytes that rows take.

A client is observed from outside (`client.py` wraps any other), so adapters know nothing of it. Nothing in here changes
what an operation does, and nothing that listens can fail it or make it wait.
"""
