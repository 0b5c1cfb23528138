"""Where workers live: `local`, a thread of this process each.

Knows how to run calls off the event loop, and how to stop waiting for them, and nothing of what they do.
"""
