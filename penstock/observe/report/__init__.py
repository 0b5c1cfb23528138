"""The report of a run: one self-contained HTML page, made from the files of its run directory.

`data` and `trace_data` read files, any of which may be missing or cut off; `chart`, `stack` and `tracks` draw;
`headline` and `sections_*` decide what is shown; `page` puts it together. Knows files and metric names, and nothing
about running parts.
"""
