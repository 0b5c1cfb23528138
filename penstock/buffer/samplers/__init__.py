"""Staleness policies: each decides what may be dispatched and what may be trained.

A policy sees the clock, the quota and the slots; it changes none of them and knows nothing of the buffer around it.
"""
