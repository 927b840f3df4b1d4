"""Folders for the output of the ranks of an attempt."""

from pathlib import Path

from mcore_rl.errors import ConfigError


def next_log_dir(run_dir: Path) -> Path:
    """Make and return a new folder `run_dir/logs/<n>`: no attempt overwrites the output of an earlier one."""
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        attempts = [int(folder.name) for folder in logs.iterdir() if folder.name.isdecimal()]
        folder = logs / str(max(attempts, default=-1) + 1)
        folder.mkdir()
    except OSError as error:
        raise ConfigError(
            f'run_dir="{run_dir}" cannot be written: {error.strerror}. Choose another.'
        ) from None
    return folder
