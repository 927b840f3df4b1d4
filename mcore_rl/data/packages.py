"""Packages that only some data needs."""

import importlib
from typing import Any

from mcore_rl.errors import ConfigError


def required_package(module: str, extra: str, name: str) -> Any:
    """Import a module with which `name` is read; a ConfigError names the `extra` that has it, where it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{name} is read with the package {module.partition('.')[0]}, which is not installed. Install it: "
            f"pip install 'mcore-rl[{extra}]'."
        ) from error
