"""A forecast, in closed form, of the disk that a run takes, so that a full disk is known before hours are spent.

It counts checkpoints (weights, and with optimizer state three fp32 numbers for each weight) and the samples of RL that
people read. Metrics, logs and the tables of experts are small in comparison.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.planning.adapters import with_adapters
from mcore_rl.planning.memory import GIB
from mcore_rl.planning.training import Training
from mcore_rl.planning.weights import FP32_BYTES, Weights, weights_by_stage

STATE_BYTES = 12
"""Bytes of a weight's optimizer state in a checkpoint, fp32 in every precision: the weight and two moments."""
TEXT_BYTES = 5
"""Bytes of a token's text in the files of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Bytes that a run writes to its folder."""

    checkpoint: int
    """Bytes of one checkpoint."""
    num_checkpoints: int
    """Largest number of checkpoints at one time: the kept checkpoints, and the checkpoint that is being written."""
    samples: int
    """Bytes of all files of samples; 0 without RL."""

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.checkpoint * self.num_checkpoints + self.samples

    def describe(self) -> str:
        """Return the total and its parts, for messages."""
        text = f"{_gib(self.total)} ({self.num_checkpoints} checkpoints of {_gib(self.checkpoint)}"
        if self.samples:
            text += f", samples {_gib(self.samples)}"
        return f"{text})"


def disk_of(training: Training) -> Disk:
    """Return the bytes that a whole run takes."""
    checkpoint, steps, whole = training.checkpoint, training.steps, MeshConfig()
    weights, num_trained = Weights(), 0
    # A checkpoint holds every model that is trained, including a critic.
    for model in (model for model in training.models if model.trains):
        (stage,) = with_adapters(weights_by_stage(model.model, whole), model.lora, model.model, whole)
        is_left_out = model.lora.is_on and checkpoint.weights == "adapters"
        weights += stage.adapters if is_left_out else stage
        num_trained += (stage.adapters if model.lora.is_on else stage).trainable
    element = 2 if training.platform.precision == "bf16" else 4
    saves = -(-steps // (checkpoint.interval or steps))
    return Disk(
        checkpoint=weights.total * element + num_trained * STATE_BYTES + weights.fp32_buffers * FP32_BYTES,
        num_checkpoints=saves if checkpoint.keep == "all" else min(saves, checkpoint.keep + 1),
        samples=_samples(training),
    )


def disk_warning(run_dir: Path, disk: Disk) -> str:
    """Return a sentence if the file system of `run_dir` has less room than the run will take, else an empty string."""
    folder = run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    # A run that resumes has written a part already.
    written = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    if disk.total - written <= free:
        return ""
    return (
        f"the run will take {disk.describe()} of disk, and {existing} has {_gib(free)} free"
        f"{f' beside {_gib(written)} of checkpoints' if written else ''}. Make room, choose another run_dir, or lower "
        "checkpoint.keep."
    )


def _samples(training: Training) -> int:
    rollouts = training.rollouts
    if rollouts is None or rollouts.samples_interval is None:
        return 0
    written = -(-training.num_rollouts // rollouts.samples_interval)
    return written * rollouts.num_completions * training.sample_length * TEXT_BYTES


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
