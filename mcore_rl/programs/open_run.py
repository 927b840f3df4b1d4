"""Opening a run of any training program: as the only writer of its folder, from its last checkpoint."""

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from mcore_rl.checks.inputs import contents_of_inputs, inputs_of
from mcore_rl.checks.mesh import mesh_dependences
from mcore_rl.config.extension import load_extensions
from mcore_rl.config.load import dump_config
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.run import PlatformConfig, RunConfig
from mcore_rl.config.speed import run_flags
from mcore_rl.errors import DataError
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.attempts import add_attempt, this_run_attempt
from mcore_rl.metrics.attempts_file import FILE_NAME, read_attempts
from mcore_rl.metrics.sinks import open_log, silent_log
from mcore_rl.model.transformer_config import machine_of
from mcore_rl.planning.memory import device_memory_lines, disk_of, disk_warning
from mcore_rl.planning.training import training_of
from mcore_rl.programs.finished_run import changes_since_done, refuse_other_run
from mcore_rl.storage.checkpoint import saved_steps
from mcore_rl.storage.files import full_disk_explained, write_atomically
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.train.loop import Run, StopRequest
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.saving import Checkpoints
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.workers.rank_guard import rank_guard
from mcore_rl.workers.watchdog import Limits, Watchdog

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def run_rank(train: Callable[[AnyConfig], None], config: type[AnyConfig], argv: Sequence[str]) -> int:
    """Run one rank of a program; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    with rank_guard():
        train(load_run_config(config, Path(argv[0]), argv[1:]))
    return 0


def is_done(config: RunConfig, platform: Platform) -> bool:
    """Collective over the world: return whether an earlier start did all steps of this run; rank 0 then prints so.

    Raises CheckpointError if another program made them, ConfigError if they were another run's.
    """
    message = RunFolder(Path(config.run_dir)).done()
    if message:
        on_rank_zero(
            lambda: refuse_other_run(config.run_dir, changes_since_done(config), config.checkpoint.allow_changes)
        )
    if message and platform.rank == 0:
        sys.stdout.write(f"nothing to do: {message}\n")
    return message is not None


@contextmanager
def open_run(
    config: RunConfig,
    platform: Platform,
    orders: Mapping[str, dict[str, str]] = MappingProxyType({}),
    before_models: Callable[[], None] | None = None,
) -> Iterator[Run]:
    """Collective over the world: become the only writer of `config.run_dir`, and resume the run in the folder.

    Inside, SIGTERM, SIGUSR1, SIGHUP and a file STOP in the folder end the run after the current step, and a rank ends
    itself if its start, a step or a save takes longer than `train.hang_start_s`, `hang_s` or `hang_save_s`. On exit,
    the log is closed and the folder has no writer.

    Args:
        config: The config, checked for this world.
        platform: The platform of this rank; its process group is up.
        orders: Field -> source -> further values, besides fields and files, that the order of its data depends on;
            recorded and compared on resume like the contents of files.
        before_models: Called once the folder is this run's, before models take memory; None: nothing.

    Yields:
        The run at the step of its last checkpoint, of `checkpoint.load`, or at step 0.

    Raises:
        CheckpointError: if another process writes to the folder, or a checkpoint cannot be read.
        TrainingError: if the disk is full for other files that the run writes, such as its metrics.
    """
    extensions = load_extensions(config)
    folder = RunFolder(Path(config.run_dir))
    train = config.train
    limits = Limits(
        start_s=train.hang_start_s, step_s=train.hang_s, pause_s=train.hang_save_s, wait_s=config.server_wait_s
    )
    with full_disk_explained(folder.path), Watchdog(limits, platform.rank) as watchdog:
        fence = folder.claim()
        platform, changed_layers = keep_layers(config.platform, platform, folder)
        if before_models is not None:
            before_models()
        state = set_up(config, platform)
        inputs = {**on_rank_zero(lambda: contents_of_inputs(inputs_of(config)) | {"code": extensions}), **orders}
        checkpoints = Checkpoints(state, folder.checkpoints, fence, inputs)
        resumption = checkpoints.resume()
        adapters = _adapters(config.lora, config.model, state, is_new=not saved_steps(folder.checkpoints))
        step = state.progress.step
        flags = run_flags(config, machine_of(platform))
        attempt = this_run_attempt(
            platform,
            config.mesh,
            step,
            extensions,
            speed=flags,
            changes=resumption.changes,
            warnings=(*resumption.warnings, *changed_layers),
        )

        def record_start() -> list[str]:
            # After the resume, so that a refused resume leaves the run's config unchanged.
            warnings = _damaged_config_aside(folder)
            write_atomically(folder.path / "config.toml", dump_config(config))
            add_attempt(folder.path, attempt)
            return warnings

        warnings = on_rank_zero(record_start)
        if platform.is_cuda and platform.precision == "fp32":
            warnings.append(
                'platform.precision="fp32" on GPUs: products take up to 15 times as long as in bf16. Set it to "bf16" '
                "in a new run unless that is meant"
            )
        log = silent_log()
        if platform.rank == 0:
            settings = config.model_dump(mode="json")
            log = open_log(folder.path, config.log, step, config.train.steps, settings)
        log.message(platform.describe())
        log.detail(flags.describe())
        dependences = mesh_dependences(config, platform.world_size)
        for line in [*adapters, *_memory_lines(config, platform), *checkpoints.poll(), *dependences]:
            log.message(line)
        for sentence in (*changed_layers, *warnings):
            log.message(f"warning: {sentence}")
        if platform.rank == 0:
            disk = disk_of(training_of(config, platform.world_size))
            if warning := disk_warning(folder.path, disk):
                log.message(f"warning: {warning}")
        log.write_now(step, checkpoints.take_metrics())
        with StopRequest(folder.stop_file) as request:
            yield Run(
                state=state,
                folder=folder,
                checkpoints=checkpoints,
                log=log,
                fence=fence,
                watchdog=watchdog,
                request=request,
            )
        # Not after an error: releasing the fence is a collective, which other ranks may never reach. The next start
        # takes the folder over from a dead process.
        log.close()
        fence.release()


def _adapters(lora: LoraConfig, model: ModelConfig, state: TrainState, *, is_new: bool) -> list[str]:
    """Collective over the world: load the adapters of `lora.load` into a new run, and return log lines."""
    if not lora.is_on:
        return []
    from mcore_rl.model.adapters import describe_adapters, fill_adapters  # only runs that train adapters

    lines = [describe_adapters(state.chunks)]
    if lora.load is not None and is_new:
        from mcore_rl.convert.peft import read_peft  # only runs that begin with such adapters

        fill_adapters(state.chunks, read_peft(Path(lora.load), lora, model))
        state.optimizer.reload_model_params()
        lines.append(f"adapters of {lora.load}")
    return lines


def _damaged_config_aside(folder: RunFolder) -> list[str]:
    """Rename a config.toml that is not TOML, on rank 0, before a new file replaces it; return a sentence if so."""
    path = folder.path / "config.toml"
    try:
        tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:  # not TOML, or not UTF-8
        return [f"{path} was damaged, and is {folder.set_aside(path.name).name} now: this start wrote a new one"]
    return []


def _memory_lines(config: RunConfig, platform: Platform) -> list[str]:
    """Return the estimate of this run's memory with its actual layers, if the device's memory is known."""
    if platform.device_bytes is None:
        return []
    settings = config.platform.model_copy(update={"layers": platform.layers})
    actual = training_of(config.model_copy(update={"platform": settings}), platform.world_size)
    return list(device_memory_lines(actual, platform.device_bytes))


def keep_layers(config: PlatformConfig, platform: Platform, folder: RunFolder) -> tuple[Platform, tuple[str, ...]]:
    """Collective over the world: use the layers that the last start of a run recorded, before a model is built.

    A run with torch's layers keeps them if `platform.layers` is "auto". Returns the platform and warnings: if the order
    of sums differs from the last start, and if run.json was damaged, which is then renamed.
    """
    recorded, damage = on_rank_zero(partial(_last_layers, folder))
    if recorded == "torch" and platform.layers == "cpu" and config.layers == "auto" and not config.bf16_products:
        platform = platform.with_torch_layers(f"as in {FILE_NAME}")
    if not recorded or recorded == platform.layers_id:
        return platform, damage
    return platform, (
        *damage,
        f'{FILE_NAME} has the layers "{recorded}", and this start computes with "{platform.layers_id}": the run is '
        "not continued bit for bit. For that, resume on a machine like the first, with the same platform.layers",
    )


def _last_layers(folder: RunFolder) -> tuple[str, tuple[str, ...]]:
    """Return the layers of the last start ("" if not recorded), and a sentence if the record is damaged."""
    try:
        return next((attempt.layers for attempt in read_attempts(folder.path)[::-1]), ""), ()
    except DataError:
        aside = folder.set_aside(FILE_NAME)
        return "", (
            f"{folder.path / FILE_NAME} was damaged, and is {aside.name} now: the report knows nothing of the starts "
            "before, and a run on a CPU chooses its layers anew",
        )
