"""What settings are called elsewhere, and were called here before: one table for error messages and for the docs.

`ours` has the names that changed; `trl`, `verl`, `nemo_rl`, `prime_rl` (with AReaL) and `common` have the names of
other systems, as docs/coming-from.md shows them. `answers` looks a name up, `page` fills the tables of that page.
Nothing in here knows the models but `page`, which shows our defaults.
"""
