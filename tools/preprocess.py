"""Make a Megatron dataset of text files: `mcore-rl data preprocess`."""

import sys

from mcore_rl.cli.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "preprocess", *sys.argv[1:]]))
