"""`mcore-rl convert` as a script."""

import sys

from mcore_rl.cli.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
