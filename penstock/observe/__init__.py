"""What a run shows and writes about itself: metrics and events as JSON lines, a progress view on the console,
and loggers for what people use besides.

Receives names and numbers, never tensors or the objects they come from; knows nothing of pumps, engines or trainers.
"""
