"""Composition root: config -> built objects -> run; checkpoints; run directory.

The only layer that knows all the others below the command line; nothing but the command line imports it.
"""
