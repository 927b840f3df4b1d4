"""The folder of a finished run, as far as a later start looks at it."""

from pathlib import Path
from typing import TypeVar

from mcore_rl.config.kinds import kind_of_config
from mcore_rl.config.run import RunConfig
from mcore_rl.storage.checkpoint import Marker, write_marker

C = TypeVar("C", bound=RunConfig)


def finish(config: C) -> C:
    """Leave in its folder the marker of the last checkpoint of `config`, and return it."""
    path = Path(config.run_dir) / "checkpoints/iter_0000004"
    path.mkdir(parents=True)
    marker = Marker(
        step=4,
        time="",
        world_size=1,
        mesh={},
        model=config.model.model_dump(mode="json"),
        megatron="",
        files={},
        program=kind_of_config(config),
        settings=config.model_dump(mode="json"),
    )
    write_marker(path, marker)
    return config
