"""What differs from one kind of trainer to another, behind the `Backend` protocol: `local` computes on one device.

A backend runs microbatches through its model and owns weights, gradients and optimizer. It knows nothing of steps, of
the data plane or of what a loss is made of.
"""
