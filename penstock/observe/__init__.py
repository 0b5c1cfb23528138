"""What a run shows and writes about itself: metrics, events and samples as JSON lines, the timeline, a progress view on
the console, loggers for other tools, and the report.

Receives names and numbers, never tensors or the objects they come from; knows nothing about pumps, engines or trainers.
"""
