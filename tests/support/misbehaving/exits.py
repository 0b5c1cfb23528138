"""A script without `if __name__ == "__main__"`."""

import sys

sys.exit(0)
