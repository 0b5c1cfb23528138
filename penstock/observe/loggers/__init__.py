"""Where a run's metrics go in addition to its own files: TensorBoard, Weights & Biases, MLflow, a page for Prometheus.

All of them use the interface in `base`; each third-party package is imported in one file, when its logger starts.
Loggers receive names and numbers; they know nothing about the run that creates them, and cannot end or stall it.
"""
