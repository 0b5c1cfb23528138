"""The package itself: what it asks for, what it is called, and its wheel."""
