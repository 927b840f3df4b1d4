"""Several reinforcement-learning runs from the same start, for comparison."""

from typing import Annotated

from pydantic import Field, PositiveFloat

from mcore_rl.config.section import Section, Seed, Text


class StudyConfig(Section):
    """`mcore-rl study`: each arm is the base config with its own values for some fields, run once per seed."""

    base: Text | None = None
    """RL config that all arms start from, relative to the folder in which the command is given; required."""
    run_dir: str = "runs/study"
    """Folder of the runs, each in a folder of its own; a finished run is not repeated, and an interrupted run resumes
    from its newest checkpoint (checkpoint.interval)."""
    seeds: tuple[Seed, ...] = (1234,)
    """Values of train.seed, with a run of each arm for each: it decides prompts, their order, and sampling. The weights
    come from checkpoint.load. All arms are run with the first seed before any with the second."""
    overrides: tuple[str, ...] = ()
    """Fields for all arms, written as on the command line."""
    arms: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name of each arm, with its own fields."""
    budget_minutes: PositiveFloat | None = None
    """Minutes after which the study stops: the current run finishes its rollout batch and saves, and the same command
    resumes it; `none`: no limit."""
    collapse_below: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A run has collapsed if the mean reward of its last fifth is below this fraction of the mean reward of its best
    fifth."""
