"""`mcore-rl inspect` as a script."""

import sys

from mcore_rl.cli.cli import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
