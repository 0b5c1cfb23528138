"""A taskset whose module is a script that exits."""

import sys

sys.exit(0)
