"""Creation of the environment named in the config."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl.environment import EnvironmentConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rl.environments.interface import Environment

ENVIRONMENTS = {
    "calculator": "mcore_rl.rl.environments.tools:Calculator",
    "guessing": "mcore_rl.rl.environments.guessing:Guessing",
    "python": "mcore_rl.rl.environments.python_tool:PythonTool",
    "reasoning_gym": "mcore_rl.rl.environments.reasoning_gym:ReasoningGym",
    "textarena": "mcore_rl.rl.environments.textarena:TextArena",
}
"""Class of each built-in environment; adapters import their package only when used."""


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that creates an environment of the config.

    Raises:
        ConfigError: if the name is unknown, a package or sandbox is missing, or the arguments do not match.
    """
    assert config.name is not None
    path = ENVIRONMENTS.get(config.name)
    if path is None:
        found: Any = load_extension("rl.environment.name", config.name)
    else:
        module, _, name = path.partition(":")
        found = getattr(importlib.import_module(module), name)
    make: Callable[[], Environment] = partial(found, **config.arguments)
    try:
        make()
    except TypeError as error:
        raise ConfigError(
            f'rl.environment.arguments do not fit rl.environment.name="{config.name}": {error}.'
        ) from error
    return make
