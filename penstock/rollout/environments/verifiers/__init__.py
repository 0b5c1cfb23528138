"""Environments of the `verifiers` package, which is imported here and nowhere else."""
