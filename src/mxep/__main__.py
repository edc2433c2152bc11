"""`python -m mxep`: the command line, where the script `mxep` is not on the PATH."""

import sys

from mxep.cli import main

if __name__ == "__main__":
    sys.exit(main())
