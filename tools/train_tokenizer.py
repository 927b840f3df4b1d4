"""Train a sentencepiece tokenizer: `mcore-rl data tokenizer`."""

import sys

from mcore_rl.cli.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "tokenizer", *sys.argv[1:]]))
