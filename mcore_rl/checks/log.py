"""Checks that the packages that a run logs with are installed."""

import importlib.util
from collections.abc import Iterator

from mcore_rl.config.run import LogConfig

PACKAGES = ("wandb", "mlflow", "swanlab", "trackio")
"""Entries of log.sinks that need a module of the same name, which is an extra of this package."""


def absent_packages(log: LogConfig) -> Iterator[str]:
    """Yield an error message for each package that log.sinks needs and that is not installed."""
    for sink in log.sinks:
        if sink in PACKAGES and importlib.util.find_spec(sink) is None:
            yield (
                f"log.sinks names {sink}, which is not installed. Install it: `pip install "
                f"'mcore-rl[{sink}]'`; or leave {sink} out."
            )
