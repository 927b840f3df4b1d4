"""What all training programs do from a checked config to DONE."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.backend.platform import Platform
from mcore_rl.config.load import dump_config
from mcore_rl.config.run import RunConfig
from mcore_rl.data.loader import BatchSource, SampleDataset
from mcore_rl.obs.metrics import Metric
from mcore_rl.obs.sinks import Log, open_log, silent_log
from mcore_rl.parallel.agree import on_rank_zero
from mcore_rl.train.checkpoint import Checkpoints
from mcore_rl.train.loop import Fit, Sources
from mcore_rl.train.objectives import NextTokenHead
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.stop import StopRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a program trains on."""

    sources: Callable[[TrainState, RunFolder], Sources]
    """Collective over the world: the batches of this data-parallel rank."""
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
    fence = folder.claim()
    on_rank_zero(lambda: (folder.path / "config.toml").write_text(dump_config(config), encoding="utf-8"))
    state = set_up(config, platform)
    checkpoints = Checkpoints(state, folder.checkpoints, fence)
    checkpoints.resume()
    log = _opened_log(state, folder, data)
    for line in [platform.describe(), *checkpoints.poll(), *data.lines]:
        log.say(line)
    with StopRequest(folder.stop_file) as stop:
        sources = data.sources(state, folder)
        head = NextTokenHead()
        fit = Fit(state, head, sources, checkpoints=checkpoints, log=log, stop=stop.agreed)
        if fit.run():
            folder.mark_done(state.progress.step)
    log.close()
    fence.release()


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
