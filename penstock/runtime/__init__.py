"""Where workers live: `local` gives each a thread of this process.

Knows how to run calls off the event loop and how to stop waiting for them, but nothing about what they do.
"""
