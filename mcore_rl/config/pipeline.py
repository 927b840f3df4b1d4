"""Several programs one after the other, each a job that starts when the one before has succeeded."""

from collections.abc import Iterator

from pydantic import NonNegativeInt, PositiveInt

from mcore_rl.config.section import Section

STAGES = ("pretrain", "sft", "convert", "rl")


class TrainingStage(Section):
    """A training; left out when `config` is empty."""

    config: str = ""
    """Its config file."""
    fields: tuple[str, ...] = ()
    """Fields of the config on top, as "checkpoint.load=runs/pretrain"."""
    nodes: PositiveInt = 1
    """Nodes of the job."""
    time: str = ""
    """Limit of one attempt; empty: the cluster's."""

    @property
    def is_given(self) -> bool:
        """Whether the pipeline has it."""
        return bool(self.config)


class ConversionStage(Section):
    """A conversion between Hugging Face's and Megatron's formats on one node; left out without `arguments`."""

    arguments: tuple[str, ...] = ()
    """What follows `mcore-rl convert`, as ["export", "runs/sft", "out/model", "--workers", "8"]."""
    gpus: NonNegativeInt = 0
    """GPUs to ask for, where a partition gives no nodes without; none is used."""
    time: str = "04:00:00"
    """Limit of the job."""

    @property
    def is_given(self) -> bool:
        """Whether the pipeline has it."""
        return bool(self.arguments)


class PipelineConfig(Section):
    """`mcore-rl launch PIPELINE.toml`: the stages below in their order, those that are given."""

    name: str = "pipeline"
    """Jobs are called after it and their stage: pipeline-sft."""
    run_dir: str = "runs/pipeline"
    """Where the conversion's job leaves its logs; trainings have their own run_dir."""
    pretrain: TrainingStage = TrainingStage()
    sft: TrainingStage = TrainingStage()
    convert: ConversionStage = ConversionStage()
    rl: TrainingStage = TrainingStage()

    @property
    def stages(self) -> Iterator[tuple[str, TrainingStage | ConversionStage]]:
        """Name and settings of those that are given, in the order in which they run."""
        for name in STAGES:
            stage = getattr(self, name)
            if stage.is_given:
                yield name, stage
