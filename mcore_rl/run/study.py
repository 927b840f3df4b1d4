"""`mcore-rl study`: runs from one start that differ in a few fields, and one table of their results."""

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
class PlannedRun:
    """One run of a study: its arguments of `mcore-rl rl` and its number of ranks."""

    arm: str
    seed: int
    folder: Path
    arguments: list[str]
    ranks: int


def main(args: argparse.Namespace) -> int:
    """Run what is not done yet, then write and print the table.

    Returns:
        The exit status: 0, or that of the first run that fails, which ends the study.
    """
    study = load_config(StudyConfig, Path(args.config), args.overrides)
    console = Console()
    planned = list(plan(study))
    for index, run in enumerate(planned, start=1):
        title = f"{index}/{len(planned)} {run.arm}, seed {run.seed}"
        if (run.folder / "DONE").exists():
            console.print(f"{title}: done before ({run.folder})", soft_wrap=True)
            continue
        console.print(f"[bold]{title}[/]\n$ mcore-rl rl {' '.join(run.arguments)}", soft_wrap=True)
        status = launch_local(PROGRAMS["rl"].module, run.arguments, run.ranks, next_log_dir(run.folder))
        if status:
            return status
        if not (run.folder / "DONE").exists():
            console.print("stopped as asked; the same command resumes the study")
            return 0
    folders: dict[str, dict[int, Path]] = {}
    for run in planned:
        folders.setdefault(run.arm, {})[run.seed] = run.folder
    rows = [row_of(arm, by_seed) for arm, by_seed in folders.items()]
    out = Path(study.run_dir)
    (out / "study.md").write_text(as_markdown(rows), encoding="utf-8")
    (out / "study.json").write_text(as_json(rows), encoding="utf-8")
    sys.stdout.write(as_markdown(rows))
    return 0


def plan(study: StudyConfig) -> Iterator[PlannedRun]:
    """Yield all runs, each checked; ConfigError when one of them cannot run."""
    if study.base is None or not study.arms or not study.seeds:
        raise ConfigError(
            "A study needs `base`, at least one of `seeds`, and `arms`: name = [fields]. Set them."
        )
    for arm, fields in study.arms.items():
        for seed in study.seeds:
            folder = Path(study.run_dir) / f"{arm.lower().replace(' ', '_').replace('+', 'with')}-{seed}"
            arguments = [study.base, *study.overrides, *fields, f"run_dir={folder}", f"train.seed={seed}"]
            try:
                _, ranks = PROGRAMS["rl"].checked_config(Path(study.base), arguments[1:], None)
            except ConfigError as error:
                raise ConfigError(f"arm {arm!r}: {error}") from None
            yield PlannedRun(arm, seed, folder, arguments, ranks)
