"""Modules of users that do what no module should, to be named in settings."""
