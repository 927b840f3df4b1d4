"""What all training programs do from a checked config to DONE."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.backend.platform import Platform
from mcore_rl.backend.watchdog import Watchdog
from mcore_rl.config.extension import load_extensions
from mcore_rl.config.load import dump_config
from mcore_rl.config.run import RunConfig
from mcore_rl.data.loader import BatchSource, SampleDataset
from mcore_rl.obs.attempts import add_attempt, this_run_attempt
from mcore_rl.obs.metrics import Metric
from mcore_rl.obs.sinks import Log, open_log, silent_log
from mcore_rl.parallel.agree import on_rank_zero
from mcore_rl.train.loop import Fit, Loop, Run, Sources
from mcore_rl.train.objectives import NextTokenHead
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.saving import Checkpoints
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.stop import StopRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a program trains on."""

    begin: Callable[[Run], AbstractContextManager[Loop]]
    """Collective over the world: the loop, and the end of what it started."""
    facts: Callable[[], Sequence[Metric]]
    """On rank 0: what the log says of the data."""
    lines: tuple[str, ...] = ()
    """Sentences for the log."""


def train(config: RunConfig, data: Data, platform: Platform) -> None:
    """Collective over the world: to DONE, or to the checkpoint at which a stop was asked for."""
    folder = RunFolder(Path(config.run_dir))
    if finished := folder.done():
        if platform.rank == 0:
            sys.stdout.write(f"nothing to do: {finished}\n")
        return
    with Watchdog(config.train.hang_s, platform.rank) as watchdog:
        _train(config, data, platform, folder, watchdog)


def _train(config: RunConfig, data: Data, platform: Platform, folder: RunFolder, watchdog: Watchdog) -> None:
    extensions = load_extensions(config)
    fence = folder.claim()
    on_rank_zero(lambda: (folder.path / "config.toml").write_text(dump_config(config), encoding="utf-8"))
    state = set_up(config, platform)
    checkpoints = Checkpoints(state, folder.checkpoints, fence)
    checkpoints.resume()
    on_rank_zero(
        lambda: add_attempt(
            folder.path, this_run_attempt(platform, config.mesh, state.progress.step, extensions)
        )
    )
    log = _opened_log(state, folder, data)
    for line in [platform.describe(), *checkpoints.poll(), *data.lines]:
        log.message(line)
    log.write_now(state.progress.step, checkpoints.take_metrics())
    with StopRequest(folder.stop_file) as request:

        def stop() -> str | None:
            watchdog.beat()
            if platform.rank == 0:
                fence.check_here()
            return request.agreed()

        run = Run(state=state, folder=folder, checkpoints=checkpoints, log=log, stop=stop)
        with data.begin(run) as loop:
            if loop.run():
                folder.mark_done(state.progress.step)
    log.close()
    fence.release()


def fitting(
    sources: Callable[[TrainState, RunFolder], Sources],
) -> Callable[[Run], AbstractContextManager[Loop]]:
    """`Data.begin` of next-token training on `sources`, which are collective over the world."""

    def begin(run: Run) -> AbstractContextManager[Loop]:
        own = sources(run.state, run.folder)
        return nullcontext(Fit(run, NextTokenHead(), own))

    return begin


def batches(state: TrainState, dataset: SampleDataset) -> BatchSource:
    """This data-parallel rank's share of `dataset`."""
    dp = state.mesh.dp
    return BatchSource(dataset, micro_batch=state.config.train.micro_batch, dp_rank=dp.rank, dp_size=dp.size)


def _opened_log(state: TrainState, folder: RunFolder, data: Data) -> Log:
    """The log of the run on rank 0, silent elsewhere."""
    config, step = state.config, state.progress.step
    if state.platform.rank != 0:
        return silent_log()
    log = open_log(folder.path, config.log, step, config.train.steps, config.model_dump(mode="json"))
    log.write_now(step, list(data.facts()))
    return log
