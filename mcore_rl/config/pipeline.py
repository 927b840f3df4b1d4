"""Several programs in sequence, each a job that starts after the previous job has succeeded."""

from functools import cached_property
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.section import Section, Seed, Text


class StudyConfig(Section):
    """`mcore-rl study`: each arm is the base config with some fields of its own, and runs once per seed."""

    base: Text | None = None
    """RL config that all arms start from, relative to the folder in which you start the command; required."""
    run_dir: str = "runs/study"
    """Folder of the runs, each in a folder of its own. A finished run is not repeated; an interrupted run resumes from
    its newest checkpoint (checkpoint.interval)."""
    seeds: tuple[Seed, ...] = (1234,)
    """Values of train.seed; each arm runs once with each. The seed decides prompts, their order, and sampling; the
    weights come from checkpoint.load. All arms run with the first seed before any runs with the second."""
    overrides: tuple[str, ...] = ()
    """Fields of all arms, written as on the command line."""
    arms: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name of each arm with its own fields, written as on the command line."""
    budget_minutes: PositiveFloat | None = None
    """Minutes after which the study stops: the current run finishes its rollout batch and saves, and the same command
    resumes it. `none`: no limit."""
    collapse_below: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A run has collapsed if the mean reward of its last fifth is below this fraction of its best fifth's."""


STAGES = ("pretrain", "sft", "rm", "dpo", "convert", "rl")


class TrainingStage(Section):
    """A training; without `config` the pipeline leaves it out."""

    config: Text | None = None
    """Config file of the training; `none`: the pipeline leaves it out."""
    fields: tuple[str, ...] = ()
    """Fields that override the config file, such as "checkpoint.load=runs/pretrain"."""
    nodes: PositiveInt = 1
    """Number of nodes of the job."""
    time: Text | None = None
    """Time limit of one attempt, as slurm.time; `none`: the cluster's."""


class ConversionStage(Section):
    """A conversion between Hugging Face's and Megatron's formats on one node; left out without `arguments`."""

    arguments: tuple[str, ...] = ()
    """Arguments of `mcore-rl convert`, such as ["export", "runs/sft", "out/model", "--workers", "8"]."""
    gpus: NonNegativeInt = 0
    """GPUs to request, for partitions without CPU nodes; the conversion uses none."""
    time: str = "04:00:00"
    """Time limit of the job, as slurm.time."""


class PipelineConfig(Section):
    """`mcore-rl launch PIPELINE.toml`: runs its stages in the order below."""

    name: str = "pipeline"
    """Prefix of the job names, which end in the stage: pipeline-sft."""
    run_dir: str = "runs/pipeline"
    """Folder for the logs of the conversion job; trainings have their own run_dir."""
    pretrain: TrainingStage = TrainingStage()
    sft: TrainingStage = TrainingStage()
    rm: TrainingStage = TrainingStage()
    dpo: TrainingStage = TrainingStage()
    convert: ConversionStage = ConversionStage()
    rl: TrainingStage = TrainingStage()

    @cached_property
    def stages(self) -> list[tuple[str, TrainingStage | ConversionStage]]:
        """Name and settings of each stage that is given, in the order in which they run."""
        stages = [(name, getattr(self, name)) for name in STAGES]
        return [(name, stage) for name, stage in stages if (stage.arguments if name == "convert" else stage.config)]
