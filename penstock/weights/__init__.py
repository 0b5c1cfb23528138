"""How weights travel from a trainer to the engines: publications, receivers, the synchronizer.

Knows tensors by their Hugging Face names, and nothing about how trainers compute or engines serve.
"""
