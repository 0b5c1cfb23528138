"""The SingleController: pumps over shared state, and the failure policy.

CPU-only and metadata-only: it awaits trainers, engines and the data plane, and never touches a sample's tensors beyond
the small columns (reward, lengths, masks' sums). Nothing here may block the event loop.
"""
