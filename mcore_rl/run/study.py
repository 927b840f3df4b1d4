"""`mcore-rl study`: runs from one start that differ in a few fields, and one table of what came of them."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mcore_rl.backend.launcher import launch_local
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.load import load_config
from mcore_rl.config.study import StudyConfig
from mcore_rl.errors import ConfigError
from mcore_rl.run.log_folders import next_log_dir
from mcore_rl.run.study_table import as_json, as_markdown, row_of


@dataclass(frozen=True, slots=True)
class Planned:
    """One run: what follows `mcore-rl rl`, and on how many ranks."""

    arm: str
    seed: int
    folder: Path
    words: list[str]
    ranks: int


def main(args: argparse.Namespace) -> int:
    """Run what is not done yet, then write and print the table; the status of the first run that fails."""
    study = load_config(StudyConfig, Path(args.config), args.overrides)
    console = Console()
    planned = list(plan(study))
    for number, run in enumerate(planned, start=1):
        title = f"{number}/{len(planned)} {run.arm}, seed {run.seed}"
        if (run.folder / "DONE").exists():
            console.print(f"{title}: done before ({run.folder})", soft_wrap=True)
            continue
        console.print(f"[bold]{title}[/]\n$ mcore-rl rl {' '.join(run.words)}", soft_wrap=True)
        status = launch_local(PROGRAMS["rl"].module, run.words, run.ranks, next_log_dir(run.folder))
        if status:
            return status
        if not (run.folder / "DONE").exists():
            console.print("stopped as asked; start again to go on")
            return 0
    folders: dict[str, dict[int, Path]] = {}
    for run in planned:
        folders.setdefault(run.arm, {})[run.seed] = run.folder
    rows = [row_of(arm, of_seeds) for arm, of_seeds in folders.items()]
    out = Path(study.run_dir)
    (out / "study.md").write_text(as_markdown(rows), encoding="utf-8")
    (out / "study.json").write_text(as_json(rows), encoding="utf-8")
    sys.stdout.write(as_markdown(rows))
    return 0


def plan(study: StudyConfig) -> Iterator[Planned]:
    """All runs, each checked; ConfigError before the first one starts."""
    if study.base is None or not study.arms or not study.seeds:
        raise ConfigError(
            "A study needs `base`, at least one of `seeds`, and `arms`: name = [fields]. Set them."
        )
    for arm, own in study.arms.items():
        for seed in study.seeds:
            folder = Path(study.run_dir) / f"{arm.lower().replace(' ', '_').replace('+', 'with')}-{seed}"
            words = [study.base, *study.overrides, *own, f"run_dir={folder}", f"train.seed={seed}"]
            try:
                _, ranks = PROGRAMS["rl"].checked_config(Path(study.base), words[1:], None)
            except ConfigError as error:
                raise ConfigError(f"arm {arm!r}: {error}") from None
            yield Planned(arm, seed, folder, words, ranks)
