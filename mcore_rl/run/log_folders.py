"""Folders for the output of the ranks of an attempt."""

from contextlib import suppress
from pathlib import Path

from mcore_rl.errors import ConfigError


def next_log_dir(run_dir: Path) -> Path:
    """Create and return a new folder `run_dir/logs/<n>`, so that no attempt overwrites an earlier attempt's output."""
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        while True:
            attempts = [int(folder.name) for folder in logs.iterdir() if folder.name.isdecimal()]
            folder = logs / str(max(attempts, default=-1) + 1)
            # Another start of the run may have created it meanwhile: the run's fence decides which of them trains.
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ConfigError(
            f'run_dir="{run_dir}" cannot be written: {error.strerror}. Choose another.'
        ) from None
