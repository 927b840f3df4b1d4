"""`mcore-rl recipes`: the configs that are included, by the names that every command accepts."""

import argparse
import shutil
import sys
import textwrap

from mcore_rl.config.recipes import recipes

MIN_WIDTH = 60


def main(args: argparse.Namespace) -> int:
    """Print every recipe with its summary; `mcore-rl recipes` has no arguments."""
    found = recipes()
    indent = max(len(recipe.name) for recipe in found) + 2
    width = max(shutil.get_terminal_size().columns, MIN_WIDTH)
    for recipe in found:
        lines = textwrap.wrap(recipe.summary, width - indent, break_on_hyphens=False) or [""]
        sys.stdout.write(f"{recipe.name:<{indent}}" + f"\n{' ' * indent}".join(lines) + "\n")
    return 0
