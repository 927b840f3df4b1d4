"""Whether the packages that a run logs with are installed."""

import importlib.util
from collections.abc import Iterator

from mcore_rl.config.run import LogConfig


def absent_packages(log: LogConfig) -> Iterator[str]:
    """Yield a sentence, with its remedy, for each package that the log needs and that is not installed."""
    if log.wandb_project and importlib.util.find_spec("wandb") is None:
        yield f"log.wandb_project = {log.wandb_project!r} needs `pip install wandb`; install it or unset it"
