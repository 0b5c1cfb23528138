"""Trainers behind the `Trainer` protocol: `local` runs a plain torch module in a thread of this process.

A worker fetches its rows itself; nothing here knows about the controller, the buffer or the engines.
"""
