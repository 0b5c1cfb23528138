"""`penstock verify`: checks of a run on the user's own model and data, before it is started.

`preflight` runs the checks; each has its own file and gives one or more rows of the table. Nothing here trains,
and nothing is written to the run's folder.
"""
