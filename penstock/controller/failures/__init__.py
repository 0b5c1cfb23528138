"""What goes wrong: how failures are classified, counted and bounded, and how a run that stands still is noticed.

Nothing in here repeats work or ends a prompt; it says what the pumps should do.
"""
