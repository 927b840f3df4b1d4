"""What `mcore-rl plan` says of a run, for the report to show beside what was measured."""

from dataclasses import dataclass
from math import inf

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.load import load_config
from mcore_rl.errors import ConfigError
from mcore_rl.plan.device import known_device
from mcore_rl.plan.estimate import estimate
from mcore_rl.plan.rates import Span
from mcore_rl.plan.search import Place
from mcore_rl.report.runs import RunRecord

NODE_GPUS = 8
"""GPUs of a node; the record of a run does not say how its ranks lay on nodes."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a run on the device that it had."""

    step: Span
    """Seconds of an optimizer step; of RL, with completions as long as they may be."""
    memory_bytes: int
    """Device memory of the fullest rank."""


def planned(run: RunRecord) -> Planned | None:
    """Return the plan of a run; None where its device is not in the table, or the config is from before a change."""
    if not run.attempts or run.stage not in PROGRAMS:
        return None
    last, program = run.attempts[-1], PROGRAMS[run.stage]
    device = known_device(str(last.machine["device"]))
    if device is None or device.links is None:
        return None
    world = int(last.machine["ranks"])
    place = Place(world_size=world, ranks_per_node=min(NODE_GPUS, world), room_bytes=inf, device=device)
    try:
        config = load_config(program.config, run.path / "config.toml")
        program.check(config, world)
    except ConfigError:
        return None
    plan = estimate(config, program, place)
    assert plan.step is not None
    return Planned(plan.step.span, plan.fullest.total)
