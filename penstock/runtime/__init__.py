"""Where workers live: `local`, a thread of this process each.

Knows how to run calls one after the other off the event loop, and nothing of what they do.
"""
