"""Several reinforcement-learning runs from one start, to be compared."""

from pydantic import Field, NonNegativeInt

from mcore_rl.config.section import Section


class StudyConfig(Section):
    """`mcore-rl study`: each arm is the base config with fields of its own, run once for each seed."""

    base: str = ""
    """The RL config that all arms start from, as a path from the folder in which the command is given."""
    run_dir: str = "runs/study"
    """Every run is a folder in it; a run that is done is not run again."""
    seeds: tuple[NonNegativeInt, ...] = (1234,)
    """train.seed of the runs of each arm: prompts, their order, and sampling; the weights are checkpoint.load's."""
    overrides: tuple[str, ...] = ()
    """Fields of all arms, written as on the command line."""
    arms: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name of each arm, and its own fields."""
