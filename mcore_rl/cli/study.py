"""`mcore-rl study`: runs from the same start that differ in a few fields, with a table of them."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.start_ranks import next_log_dir
from mcore_rl.cli.study_results import as_json, as_markdown, read_run, rows_of
from mcore_rl.config.load import load_config
from mcore_rl.config.pipeline import StudyConfig
from mcore_rl.errors import ConfigError
from mcore_rl.programs.finished_run import changes_since_done, refuse_other_run
from mcore_rl.storage.files import disk_errors_explained, has_mark, make_folder, refuse_replacing, write_atomically
from mcore_rl.workers.launcher import launch_local

RESULTS = ("study.md", "study.json")
STUDY_MARK = "written by mcore-rl study"
"""Marks each output file, so that an earlier file is recognised."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a study: its arguments for `mcore-rl rl` and its number of ranks."""

    arm: str
    seed: int
    folder: Path
    arguments: list[str]
    ranks: int

    @property
    def is_done(self) -> bool:
        """Whether all its steps are done."""
        return (self.folder / "DONE").exists()


def main(args: argparse.Namespace) -> int:
    """Do the unfinished runs, and write the results after each; return 0 or the first failed run's status."""
    study = load_config(StudyConfig, Path(args.config), args.overrides)
    refuse_other_files(Path(study.run_dir), Path(args.config))
    console = Console()
    planned = list(plan(study))
    status, stopped, module = 0, False, PROGRAMS["rl"].module
    with _asked_to_stop(study.budget_minutes) as is_asked:
        for index, run in enumerate(planned, start=1):
            title = f"{index}/{len(planned)} {run.arm}, seed {run.seed}"
            if run.is_done:
                console.print(f"{title}: done before ({run.folder})", soft_wrap=True)
                continue
            if stopped := is_asked.is_set():
                break
            console.print(f"[bold]{title}[/]\n$ mcore-rl rl {' '.join(run.arguments)}", soft_wrap=True)
            status = launch_local(module, run.arguments, run.ranks, next_log_dir(run.folder), [module])
            if is_asked.is_set():
                status = 0  # a run that was still starting ends with the status of the signal
            stopped = not status and not run.is_done
            write_results(study, planned)
            if status or stopped:
                break
    sys.stdout.write(write_results(study, planned))
    if stopped:
        console.print("stopped as asked; the same command resumes the study")
    return status


def plan(study: StudyConfig) -> Iterator[PlannedRun]:
    """Yield all runs, checked, seed by seed. Raises ConfigError if a run cannot start."""
    if study.base is None or not study.arms or not study.seeds:
        raise ConfigError("A study needs `base`, at least one of `seeds`, and `arms`: name = [fields]. Set them.")
    for seed in study.seeds:
        for arm, fields in study.arms.items():
            folder = Path(study.run_dir) / f"{arm.lower().replace(' ', '_').replace('+', 'with')}-{seed}"
            arguments = [study.base, *study.overrides, *fields, f"run_dir={folder}", f"train.seed={seed}"]
            try:
                config, ranks = PROGRAMS["rl"].checked_config(Path(study.base), arguments[1:], None)
                if (folder / "DONE").exists():
                    refuse_other_run(config.run_dir, changes_since_done(config), config.checkpoint.allow_changes)
            except ConfigError as error:
                raise ConfigError(f"arm {arm!r}: {error}") from None
            yield PlannedRun(arm, seed, folder, arguments, ranks)


def refuse_other_files(folder: Path, config: Path) -> None:
    """Raise a ConfigError if a file that a study would write to its folder exists and no study wrote it."""
    for name in RESULTS:
        refuse_replacing(
            folder / name,
            [("STUDY", config)],
            overwrite=True,
            foreign=lambda path: None if has_mark(path, STUDY_MARK) else "was not written by `mcore-rl study`",
        )


def write_results(study: StudyConfig, planned: Sequence[PlannedRun]) -> str:
    """Write study.json and study.md for all runs so far, and return the text of study.md."""
    runs = [read_run(run.arm, run.seed, run.folder) for run in planned]
    text = as_markdown(rows_of(runs, study.collapse_below))
    unfinished = [
        f"{run.arm}, seed {run.seed} ({run.rollouts} rollout batches)" for run in runs if run.starts and not run.is_done
    ]
    if waiting := sum(not run.starts for run in runs):
        unfinished.append(f"{waiting} of {len(runs)} runs, which have not begun")
    if unfinished:
        text += f"\nNot in the table, because not done: {'; '.join(unfinished)}.\n"
    settings = {"comment": STUDY_MARK} | study.model_dump(mode="json", exclude={"run_dir", "budget_minutes"})
    out = Path(study.run_dir)
    make_folder(out, "Choose another run_dir.")
    with disk_errors_explained(out, "Make room (or give write access) there, and run the same command again."):
        contents = (f"<!-- {STUDY_MARK} -->\n{text}", as_json(settings, runs))
        for name, content in zip(RESULTS, contents, strict=True):
            write_atomically(out / name, content.encode())
    return text


@contextmanager
def _asked_to_stop(minutes: float | None) -> Iterator[threading.Event]:
    """Yield an event set on SIGTERM or after `minutes`; a running run gets the signal, and saves."""
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())

    def time_is_up() -> None:
        asked.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = None if minutes is None else threading.Timer(60 * minutes, time_is_up)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield asked
    finally:
        if timer is not None:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)
