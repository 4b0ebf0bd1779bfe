"""`python -m hyperball …` is `hyperball …`."""

import sys

from hyperball.cli import main

if __name__ == "__main__":
    sys.exit(main())
