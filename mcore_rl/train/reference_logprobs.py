"""Logprobs of answers under a reference model, computed once and cached next to the run."""

import hashlib
import io
import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from mcore_rl.config.dpo import DPOConfig
from mcore_rl.data.preferences import Preferences
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.storage.checkpoint import MARKER, METADATA, find_checkpoint, saved_steps
from mcore_rl.storage.files import checkpoint_errors_explained, write_atomically
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.workers.imports import checkpoint_of

RECORD = "reference.json"
"""File in the run's folder that names the reference; a resumed run keeps this reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOrigin:
    """Origin of the weights of a run's reference model."""

    setting: str
    """`dpo.reference` of the run's first start; empty: the weights that the run started from."""
    checkpoint: str
    """Absolute path of the checkpoint; empty: random weights."""
    fingerprint: str
    """SHA-256 of the file with the checksums of the checkpoint's other files, or the seed of random weights."""


def find_origin(config: DPOConfig, folder: RunFolder) -> ReferenceOrigin:
    """Return the reference of the run: the recorded reference if the run resumes, otherwise the config's, which is
    recorded. Only the writer of the folder may call this.

    Raises:
        CheckpointError: There is no such checkpoint, or the record of a resumed run is missing.
        ConfigError: A resumed run names a different reference than at its first start.
    """
    record = folder.path / RECORD
    setting = config.dpo.reference or ""
    with checkpoint_errors_explained(record, "reading or writing"):
        if saved_steps(folder.checkpoints):
            return _recorded(record, setting)
        source = config.dpo.reference or config.checkpoint.load
        checkpoint = None
        if source:
            weights = checkpoint_of(source, config.model, folder.path)
            checkpoint = find_checkpoint(weights).absolute()
        origin = ReferenceOrigin(
            setting=setting,
            checkpoint=str(checkpoint or ""),
            fingerprint=fingerprint(checkpoint) if checkpoint else f"train.seed={config.train.seed}",
        )
        write_atomically(record, json.dumps(asdict(origin), indent=1) + "\n")
    return origin


def _recorded(record: Path, setting: str) -> ReferenceOrigin:
    if not record.exists():
        raise CheckpointError(
            f"{record} is gone, which names the reference that the run resumes with. Start it anew in another run_dir"
        )
    origin = ReferenceOrigin(**json.loads(record.read_text(encoding="utf-8")))
    if origin.setting != setting:
        raise ConfigError(
            f'dpo.reference is "{origin.setting or "none"}" in the run that resumes, "{setting or "none"}" here: its '
            "losses would be of another reference. Set it as it was, or choose another run_dir."
        )
    return origin


def fingerprint(checkpoint: Path) -> str:
    """Return the SHA-256 of the small file that changes with every other file of a checkpoint."""
    marker = checkpoint / MARKER
    return hashlib.sha256((marker if marker.exists() else checkpoint / METADATA).read_bytes()).hexdigest()


def refuse_changed_origin(origin: ReferenceOrigin) -> None:
    """Raise a CheckpointError if the reference's checkpoint has changed since the run's first start."""
    if not origin.checkpoint:
        raise CheckpointError(
            "the run began from random weights, whose logprobs are gone with its cache (dpo.reference_cache), so that "
            "it has no reference. Start it anew in another run_dir"
        )
    path = Path(origin.checkpoint)
    with checkpoint_errors_explained(path, "reading"):
        is_same = path.is_dir() and fingerprint(path) == origin.fingerprint
    if not is_same:
        raise CheckpointError(
            f"{path} is not the reference any more that the run began with, and its logprobs are not cached for this "
            "data. Put the checkpoint back, or start the run anew in another run_dir"
        )


def cache_path(config: DPOConfig, origin: ReferenceOrigin, preferences: Preferences, folder: Path) -> Path:
    """Return the cache file of these logprobs; its name is a digest of everything that determines them."""
    parts = {
        "reference": origin.fingerprint,
        "data": preferences.digest,
        "model": config.model.model_dump(mode="json"),
        "precision": config.platform.precision,
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    cache = config.dpo.reference_cache
    return (folder / "reference_logprobs" if cache == "auto" else Path(cache)) / f"{key}.npz"


def read_cached(path: Path, num_sequences: int) -> tuple[Tensor | None, str]:
    """Return the cached logprobs, float64 `[sequences]`, or None if the file is missing or damaged; and a sentence
    about the damage, or "".
    """
    if not path.exists():
        return None, ""
    try:
        # The archive has a CRC-32 of its content, which numpy checks.
        with numpy.load(path, allow_pickle=False) as archive:
            logprobs = archive["logprobs"]
        if logprobs.shape != (num_sequences,) or logprobs.dtype != numpy.float64:
            raise ValueError(f"{logprobs.dtype} of shape {logprobs.shape} for {num_sequences} answers")
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        return None, f"warning: {path} is damaged ({error}): the reference's logprobs are computed again"
    return torch.from_numpy(logprobs), ""


def write_cached(path: Path, logprobs: Tensor) -> None:
    """Write the logprobs. Raises CheckpointError if the folder is not writable."""
    content = io.BytesIO()
    numpy.savez(content, logprobs=logprobs.numpy())
    with checkpoint_errors_explained(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
