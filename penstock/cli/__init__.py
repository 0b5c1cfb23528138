"""The command line: arguments in, text out, exit codes. Thin: what a command does lives in `penstock.run`.

Nothing in here imports torch on the way to `penstock --help`; commands import what they need when they are called.
"""
