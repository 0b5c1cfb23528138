"""What a step computes: rewards, advantages, losses, KL, off-policy corrections. Pure functions on tensors.

Nothing here knows about workers, buffers or the data plane. Losses return un-normalised sums; the train step divides.
"""
