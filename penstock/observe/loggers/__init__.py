"""Where a run's metrics go besides its own files: TensorBoard, Weights & Biases, MLflow, a page for Prometheus.

All of them through the interface in `base`; each third-party package is imported in one file, when its logger starts.
Loggers receive names and numbers; they know nothing of the run that makes them, and cannot end or stall it.
"""
