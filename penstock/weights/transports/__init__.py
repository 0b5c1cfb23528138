"""How weights get from a publication's endpoint into a receiver, one file per transport.

Each file has both sides: what the trainer writes, and how a receiver opens it. Nothing here knows models or versions.
"""
