"""Several programs in sequence, each a job that starts after the previous job has succeeded."""

from collections.abc import Iterator
from functools import cached_property

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.section import Section, Text

STAGES = ("pretrain", "sft", "rm", "dpo", "convert", "rl")


class TrainingStage(Section):
    """A training; left out if `config` is none."""

    config: Text | None = None
    """Config file of the training."""
    fields: tuple[str, ...] = ()
    """Fields that override the config file, such as "checkpoint.load=runs/pretrain"."""
    nodes: PositiveInt = 1
    """Nodes of the job."""
    time: Text | None = None
    """Time limit of one attempt; `none`: the cluster's."""

    @cached_property
    def is_given(self) -> bool:
        """Whether the pipeline has this stage."""
        return self.config is not None


class ConversionStage(Section):
    """A conversion between Hugging Face's and Megatron's formats on one node; left out without `arguments`."""

    arguments: tuple[str, ...] = ()
    """Arguments of `mcore-rl convert`, such as ["export", "runs/sft", "out/model", "--workers", "8"]."""
    gpus: NonNegativeInt = 0
    """GPUs to request, if a partition has no nodes without GPUs; the conversion uses none."""
    time: str = "04:00:00"
    """Time limit of the job."""

    @cached_property
    def is_given(self) -> bool:
        """Whether the pipeline has this stage."""
        return bool(self.arguments)


class PipelineConfig(Section):
    """`mcore-rl launch PIPELINE.toml`: runs the stages that are given, in the order below."""

    name: str = "pipeline"
    """Prefix of the job names, followed by their stage: pipeline-sft."""
    run_dir: str = "runs/pipeline"
    """Folder for the logs of the conversion job; trainings have their own run_dir."""
    pretrain: TrainingStage = TrainingStage()
    sft: TrainingStage = TrainingStage()
    rm: TrainingStage = TrainingStage()
    dpo: TrainingStage = TrainingStage()
    convert: ConversionStage = ConversionStage()
    rl: TrainingStage = TrainingStage()

    @cached_property
    def stages(self) -> Iterator[tuple[str, TrainingStage | ConversionStage]]:
        """Name and settings of each stage that is given, in the order in which they run."""
        for name in STAGES:
            stage = getattr(self, name)
            if stage.is_given:
                yield name, stage
