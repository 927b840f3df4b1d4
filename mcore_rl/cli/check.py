"""`mcore-rl check`: whether files are those that were written."""

import argparse

from rich.console import Console

from mcore_rl.convert.check import plan_check
from mcore_rl.metrics.progress import readable_bytes


def main(args: argparse.Namespace) -> int:
    """Print a line for each file and return the exit status: 0, or 1 if a file is damaged or not understood."""
    console = Console()

    def show(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    plan = plan_check(args.path)
    show(plan.title)
    bad: dict[str, list[str]] = {"damaged": [], "not understood": []}
    for checked in plan.run(args.workers):
        size = "-" if checked.num_bytes is None else readable_bytes(checked.num_bytes)
        show(f"  {checked.name}  {size}  {checked.finding}")
        if checked.verdict != "sound":
            bad[checked.verdict].append(checked.name)
    damaged, strange = bad.values()
    if strange:
        show(
            f"NOT UNDERSTOOD: {', '.join(strange)}, so that nothing can be said of the files that it describes."
        )
    if damaged:
        show(f"DAMAGED: {len(damaged)} of {len(plan.checks)} files: {', '.join(damaged)}. Take another copy.")
    elif not strange:
        show(f"{len(plan.checks)} files, none damaged")
    return 1 if damaged or strange else 0
