"""`penstock verify`: checks of a run on the user's own model and data, before it is started.

`preflight` runs the checks; each has a file of its own and gives one row of the table, or a few. Nothing here trains,
and nothing is written to the run's folder.
"""
