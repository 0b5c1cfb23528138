"""Settings: pydantic models, loading with dotted overrides, and messages a person can act on.

Lowest layer: knows nothing of the rest of Penstock but its error types, and imports neither torch nor transformers.
"""
