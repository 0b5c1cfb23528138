"""What adapters share whose owner keeps the index of all rows, while the rows themselves live elsewhere.

The owner's `Store` knows rows, claims and puts that wait for room; an adapter says what memory it hands out
(`Memory`). Clients in the owner's process call the store, others send it messages (`server`, `remote`); only metadata
crosses. Which system holds the bytes is not known here.
"""
