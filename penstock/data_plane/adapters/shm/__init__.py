"""The `shm` adapter: rows in memory that several processes of one machine share.

The owner keeps the index (`store`) and hands out memory (`space`); every put is one contiguous buffer (`layout`), which
its writer fills in place and its readers see in place. Clients in the owner's process call the store, others send it
messages (`server`, `link`); only metadata crosses. Nothing here has a name in a file system.
"""
