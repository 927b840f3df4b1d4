"""The plan of a finished run, for the report to show with its measurements."""

from dataclasses import dataclass
from math import inf
from pathlib import Path

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.load import load_config
from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import known_device
from mcore_rl.planning.estimate import estimate
from mcore_rl.planning.place import Place
from mcore_rl.planning.rates import Span
from mcore_rl.planning.training import training_of

NODE_GPUS = 8
"""GPUs of a node; the record of a run does not say how its ranks were distributed over nodes."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a run on the device that it had."""

    step: Span
    """Seconds of an optimizer step; of RL, with completions as long as they may be."""
    memory_bytes: int
    """Device memory of the fullest rank."""


def plan_of_run(path: Path, stage: str, device_name: str, world_size: int) -> Planned | None:
    """Return the plan of a run; None if its device is not in the table, or its config is from before a change.

    Args:
        path: Folder of the run.
        stage: Its program, such as pretrain.
        device_name: Its device, as CUDA calls it.
        world_size: Number of its ranks.
    """
    device = known_device(device_name)
    if stage not in PROGRAMS or device is None or device.links is None:
        return None
    program = PROGRAMS[stage]
    place = Place(ranks_per_node=min(NODE_GPUS, world_size), room_bytes=inf, device=device)
    try:
        config = load_config(program.config, path / "config.toml")
        program.check(config, world_size)
        plan = estimate(training_of(config, world_size), place)
    except ConfigError:
        return None
    assert plan.step is not None
    return Planned(plan.step.span, plan.fullest.total)
