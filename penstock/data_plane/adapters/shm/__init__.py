"""The `shm` adapter: rows in memory that several processes of one machine share.

The owner keeps the index (`data_plane/store`) and hands out memory (`arena`, `space`); every put is one contiguous
buffer (`layout`), which its writer fills in place and its readers see in place. Only metadata crosses. Nothing here
has a name in a file system.
"""
