"""One module per storage system. Only these import third-party queues; each implements `DataPlaneClient`."""
