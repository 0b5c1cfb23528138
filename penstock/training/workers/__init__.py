"""What runs behind the `Trainer` protocol: `local`, a `StepWorker` in a thread; `none` and `scripted`, without a model.

`served` is a trainer as a worker of `runtime`, `front` the protocol over one, wherever it lives.

A trainer fetches its rows itself; nothing here knows about the controller, the buffer or the engines.
"""
