"""What one run does: the whole of a config file."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import DataConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.section import Section


class PlatformConfig(Section):
    """What the run computes on, and with which layers."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """Of weights and activations; gradients and optimizer state are fp32 in both."""
    layers: Literal["auto", "torch", "te"] = "auto"
    """`te`: TransformerEngine's; `torch`: ours; `auto`: `te` where it is importable and there is CUDA."""
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """8-bit matrix products; needs layers = "te"."""
    deterministic: bool = False
    """Refuse or replace algorithms whose result depends on timing."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping."""
    recompute_modules: tuple[
        Literal["core_attn", "moe", "moe_act", "layernorm", "mla_up_proj", "mlp", "shared_experts"], ...
    ] = ("core_attn",)
    """For `selective`."""
    recompute_layers: PositiveInt = 1
    """For `full`: layers between two kept activations."""
    timeout_s: PositiveFloat = 600.0
    """A collective that waits longer ends the run."""


class TrainConfig(Section):
    """Steps, batches and evaluation."""

    steps: PositiveInt = 100
    """Optimizer steps of the whole run."""
    global_batch: PositiveInt = 8
    """Sequences of one step, over all ranks."""
    micro_batch: PositiveInt = 1
    """Sequences of one forward pass on one rank."""
    ramp_start: NonNegativeInt = 0
    """Sequences of the first steps when the batch grows; 0: no ramp."""
    ramp_increment: NonNegativeInt = 0
    """By how many sequences it grows at a time."""
    ramp_samples: NonNegativeInt = 0
    """Sequences after which it has reached `global_batch`."""
    seed: NonNegativeInt = 1234
    """Of the initial weights, the order of the data, and dropout."""
    eval_interval: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end."""
    eval_batches: NonNegativeInt = 4
    """Batches of `global_batch` sequences an evaluation reads; 0: no evaluation."""
    max_skipped: NonNegativeInt = 10
    """Steps in a row with a loss or gradient that is not finite before the run gives up; each is skipped."""
    hang_s: NonNegativeFloat = 1800.0
    """A run that is so long between two steps (in RL: rollouts; also a start, an evaluation or a save) hangs: it is
    ended, to go on from its last checkpoint; 0: it may hang."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end and on a stop request."""
    keep: NonNegativeInt = 2
    """Complete checkpoints to keep; older ones are deleted; 0: all."""
    asynchronous: bool = True
    """A background process writes while training goes on."""
    load: str = ""
    """A checkpoint (or a folder of them) to start from when the run has none of its own."""
    load_optimizer: bool = True
    """Whether `load` brings optimizer, schedule and data position too, or only the weights."""
    verify_checksums: bool = True
    """What is loaded is first compared with its checksums, by all ranks together; false: trusted to be whole."""


class LogConfig(Section):
    """What is told while the run goes on; metrics.jsonl is always written."""

    interval: PositiveInt = 1
    """Steps between two lines; each tells of all steps since the last."""
    matrix_interval: NonNegativeInt = 20
    """Steps between two layer x expert tables of the load in metrics.jsonl; 0: none."""
    tensorboard: bool = False
    """Also write TensorBoard events to `<run_dir>/tensorboard`."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project; empty: not."""
    peak_tflops: NonNegativeFloat = 0.0
    """Dense peak of one rank's device, for MFU; 0: known GPUs by name, otherwise measured at start."""


class RunConfig(Section):
    """What every training program reads."""

    run_dir: str = "runs/run"
    """Where everything of this run is written; one run, one folder, one writer."""
    platform: PlatformConfig = PlatformConfig()
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class PretrainConfig(RunConfig):
    """`mcore-rl pretrain`."""

    run_dir: str = "runs/pretrain"
    """Where everything of this run is written; one run, one folder, one writer."""
    data: DataConfig = DataConfig()
