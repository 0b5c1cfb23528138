"""What a run shows and writes about itself: metrics and events as JSON lines, and a progress view on the console.

Receives names and numbers, never tensors or the objects they come from; knows nothing of pumps, engines or trainers.
"""
