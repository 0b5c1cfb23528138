"""The sections of the settings: pydantic models, every field documented.

A section knows its own fields; rules between sections are in `rules/`.
"""
