"""Hugging Face folders as weights of a run: imported once, by a single process, before ranks load them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError, ConfigError, DataError
from mcore_rl.storage.checkpoint import find_checkpoint
from mcore_rl.storage.files import sole_writer
from mcore_rl.storage.folders import ModelImport, import_of, imports_folder
from mcore_rl.workers.launcher import dies_with_parent

STANDARD_ERROR = 2
"""File descriptor of standard error; `sys.stderr` may be an object without it, as in a notebook."""
WAIT_S = 24 * 3600.0
"""Seconds that a start waits for the import of another."""


def checkpoint_of(load: str, model: ModelConfig, run_dir: Path | None) -> Path:
    """Return the checkpoint with the weights `load`; for a Hugging Face folder, its import next to `run_dir`. Raises
    CheckpointError, with the command, if the folder has not been imported.
    """
    found = import_of(load, model, imports_folder(os.environ, run_dir))
    if found is None:
        return Path(load)
    if not found.is_complete:
        raise CheckpointError(
            f"{load} is a Hugging Face folder, and {found.path} has no import of it yet. Make it, on one machine: "
            f"mcore-rl {shlex.join(found.command)}"
        )
    return found.path


def ensure_imported(load: str | None, model: ModelConfig, run_dir: Path | None) -> None:
    """Import the weights `load` if they are Hugging Face's and not imported yet; one process at a time does.

    Raises CheckpointError if the folder has no weights, ConfigError if the import failed or its folder cannot be made.
    """
    if load is None or not Path(load).is_dir():
        return None
    found = import_of(load, model, imports_folder(os.environ, run_dir))
    if found is None:
        find_checkpoint(Path(load))  # before ranks start
        return None
    if found.is_complete:
        return None
    lock = found.path.with_name(f"{found.path.name}.lock")
    try:
        found.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with sole_writer(lock, wait_s=0.0, remedy=""):
                return _make(found, load)
        except DataError:
            sys.stderr.write(f"another process imports {load}; waiting for it (it holds {lock})\n")
        remedy = "End it, or set MCORE_RL_CACHE to another folder."
        with sole_writer(lock, wait_s=WAIT_S, remedy=remedy):
            _make(found, load)
    except OSError as error:
        raise ConfigError(
            f"{load} is a Hugging Face folder, and its import cannot be written to {found.path.parent}: "
            f"{error.strerror}. Set MCORE_RL_CACHE to a folder that you may write to."
        ) from error


def _make(found: ModelImport, load: str | None) -> None:
    if found.is_complete:
        return
    sys.stderr.write(f"{load} is imported once, to {found.path}\n")
    # Standard output is for a command's own output, such as a text.
    words = [sys.executable, "-m", "mcore_rl.cli.cli", *found.command]
    # It would hold its folder against the start that waits, and takes over where this process is killed.
    status = subprocess.run(words, stdout=STANDARD_ERROR, check=False, preexec_fn=dies_with_parent()).returncode
    if status:
        raise ConfigError(
            f"{load} could not be imported (status {status}); the reason stands above. Mend it and start again: "
            "what is imported already is kept."
        )
