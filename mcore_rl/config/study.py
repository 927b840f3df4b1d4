"""Several reinforcement-learning runs from one start, to be compared."""

from typing import Annotated

from pydantic import Field, PositiveFloat

from mcore_rl.config.section import Section, Seed, Text


class StudyConfig(Section):
    """`mcore-rl study`: each arm is the base config with fields of its own, run once for each seed."""

    base: Text | None = None
    """RL config that all arms start from, as a path from the folder in which the command is given; it has to be set."""
    run_dir: str = "runs/study"
    """Folder of the runs, one folder each; a run that is done is not run again, and one that was ended resumes from its
    newest checkpoint (checkpoint.interval)."""
    seeds: tuple[Seed, ...] = (1234,)
    """Values of train.seed, one run of each arm for each: prompts, their order, and sampling. The weights are those of
    checkpoint.load. All arms are run with the first seed before any with the second."""
    overrides: tuple[str, ...] = ()
    """Fields of all arms, written as on the command line."""
    arms: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name of each arm, and its own fields."""
    budget_minutes: PositiveFloat | None = None
    """Minutes after which the study stops: the run at hand finishes its rollout batch and saves, and the same command
    resumes it; `none`: it runs to its end."""
    collapse_below: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A run has collapsed where the mean reward of its last fifth is below this share of that of its best fifth."""
