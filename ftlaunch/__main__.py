"""`python -m ftlaunch` is `ft`."""

import sys

from ftlaunch.cli import main

if __name__ == "__main__":
    sys.exit(main())
