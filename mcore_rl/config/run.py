"""The config of a pretraining run, and the sections that all trainings share."""

from functools import cached_property
from math import lcm
from typing import ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.data import DataConfig
from mcore_rl.config.extension import Extension
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.section import Seconds, Section, Seed, Store, Text

WHOLE_LOGITS_BYTES, CHUNK_BYTES = 2**31, 2**29
"""Bytes of a chunk of fp32 logits if `platform.logits_chunk_tokens` = "auto"; smaller logits stay whole."""
CHUNK_MULTIPLE = 128
"""Number of positions that "auto" makes a chunk a multiple of."""


class PlatformConfig(Section):
    """The device, number formats and layer implementation of a run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors; `auto`: CUDA if there is a GPU, else the CPU."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of weights and activations; gradients and optimizer state are fp32 with both. `auto`: bf16 on GPUs,
    fp32 on CPUs; a run that resumes keeps the format it began with."""
    layers: Literal["auto", "te", "torch", "cpu"] = "auto"
    """Implementation of the layers; `te`: TransformerEngine's; `torch`: this package's, of torch's functions, on GPUs
    and CPUs; `cpu`: the same compiled for a CPU, in fp32, from C++ files that the first run builds in the user's cache.
    `auto`: on a GPU `te` if it is installed, in RL only with servers for rollouts; on a CPU `cpu` if there is a
    compiler, each rank has one thread and the precision is fp32; else `torch`. A run that resumes keeps the layers it
    began with."""
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """Format of 8-bit matrix products; needs layers = "te"."""
    fp8_recipe: Literal["auto", "delayed", "tensorwise", "blockwise", "mxfp8"] = "auto"
    """Scaling factors of `fp8`: a factor for each tensor, from earlier steps (`delayed`) or from the tensor itself
    (`tensorwise`), or a factor for each block (`blockwise`, `mxfp8`); `auto`: `mxfp8` on Blackwell, `blockwise` on
    Hopper, else `tensorwise`."""
    permute_fusion: bool | Literal["auto"] = "auto"
    """Sort tokens by expert in a single kernel of TransformerEngine; `auto`: if it is installed and layers are `te`."""
    router_fusion: bool | Literal["auto"] = "auto"
    """Compute the router's choice in a single kernel of TransformerEngine; `auto`: as `permute_fusion`, but never in
    RL, which records and imposes choices."""
    cross_entropy_fusion: Literal["auto", "none", "native", "te"] = "auto"
    """Kernel of the cross entropy in pretraining and fine-tuning; `native`: Megatron's, which rounds the gradient of
    the logits to bf16; `te`: TransformerEngine's, which Megatron calls unstable; `auto`: `native` with bf16 and layers
    `te`. Logits in chunks (`logits_chunk_tokens`) do not use it."""
    weight_gradient_fusion: bool | Literal["auto"] = "auto"
    """Let matrix products add weight gradients to the fp32 buffer themselves; needs apex; `auto`: if it is installed
    and layers are `te`."""
    deterministic: bool = False
    """Refuse or replace algorithms with results that depend on timing."""
    batch_invariant: bool = False
    """Use products and attention for which the result of a token does not depend on the rest of its batch, so that the
    native rollout engine and the trainer agree bit for bit; slow. On a GPU it needs the package batch_invariant_ops."""
    bf16_products: bool = False
    """With layers `cpu`, round the operands of the products in linear layers and experts to bf16; sums, weights and
    everything else stay in fp32, and routers are not rounded; faster on processors that multiply bf16."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them; `selective`: the modules in
    `recompute_modules`; `full`: all between every `recompute_layers` layers."""
    recompute_modules: tuple[
        Literal["core_attn", "moe", "moe_act", "layernorm", "mla_up_proj", "mlp", "shared_experts"], ...
    ] = ("core_attn",)
    """Parts of a layer that `selective` recomputes."""
    recompute_layers: PositiveInt = 1
    """Layers between two activations that `full` keeps."""
    logits_chunk_tokens: PositiveInt | Literal["auto"] | None = "auto"
    """Number of positions for which a loss, or a pass for logprobs, has logits in memory at a time; the backward pass
    computes them again. `auto`: all if they take at most 2 GiB in fp32 on a rank, else as many as take half a GiB;
    `none`: always all."""
    timeout_s: Seconds = 600.0
    """Seconds that a collective of any group may wait; a longer wait ends the run."""

    def decided(self, *, is_cuda: bool) -> Self:
        """Return the section with a `precision` other than "auto", for ranks on GPUs or on CPUs. Until it is decided,
        nothing that depends on it is refused.
        """
        return (
            self if self.precision != "auto" else self.model_copy(update={"precision": "bf16" if is_cuda else "fp32"})
        )

    @cached_property
    def fp8_multiple(self) -> int:
        """Multiple of widths and of a rank's tokens for 8-bit products; 1 without. "auto": the largest."""
        if self.fp8 == "none":
            return 1
        return 32 if self.fp8_recipe in ("auto", "mxfp8") else 16

    def logits_chunk(self, num_tokens: int, num_columns: int) -> int | None:
        """Return how many of a rank's positions have logits at a time; None: all, kept for backward."""
        most_whole, chunk = self.logits_chunks(num_columns)
        return None if num_tokens <= most_whole else chunk

    def logits_chunks(self, num_columns: int) -> tuple[int, int | None]:
        """Return the most positions with logits at once, and how many at a time of more, None for all."""
        if self.logits_chunk_tokens != "auto":
            return 0, self.logits_chunk_tokens
        most_whole = WHOLE_LOGITS_BYTES // (4 * num_columns)
        # Matrix products are fastest with round numbers of rows.
        most = CHUNK_BYTES // (4 * num_columns)
        return most_whole, max(CHUNK_MULTIPLE, most // CHUNK_MULTIPLE * CHUNK_MULTIPLE)


class TrainConfig(Section):
    """Steps, batches and evaluation."""

    steps: PositiveInt = 100
    """Optimizer steps of the whole run."""
    global_batch: PositiveInt = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch: PositiveInt = 1
    """Sequences per forward pass on a rank."""
    ramp_start: PositiveInt | None = None
    """Sequences per step at the start of a growing batch; `none` (also in the next two): it does not grow."""
    ramp_increment: PositiveInt | None = None
    """Sequences by which the batch grows at a time."""
    ramp_samples: PositiveInt | None = None
    """Sequences trained on until the batch has reached `global_batch`."""
    seed: Seed = 1234
    """Seed of the initial weights, the order of the data, and dropout."""
    eval_interval: PositiveInt | None = None
    """Steps between evaluations; `none`: only at the end."""
    eval_batches: PositiveInt | None = 4
    """Batches of `global_batch` sequences per evaluation; `none`: no evaluation."""
    gc_interval: PositiveInt | Literal["auto"] | None = "auto"
    """Units of work (in RL: rollout batches with their updates) between two collections of Python's garbage, which all
    ranks then do at the same time, and before evaluations and checkpoints, rather than at any time; `auto`: on GPUs
    with several ranks 100, in RL 1, else `none`; `none`: whenever Python decides."""
    max_skipped: NonNegativeInt = 10
    """Maximum number of consecutive steps skipped for a loss or gradient that is not finite; one more ends the run."""
    hang_s: Seconds | Literal["auto"] | None = "auto"
    """Seconds that a step (in RL: a rollout batch and its updates) may take. A run that takes longer hangs: it is
    ended, to resume from its last checkpoint; `auto`: ten times the longest step of this start, at least 300 s, and
    `hang_start_s` for the first two steps, with servers never less than these may take; `none`: no limit."""
    hang_start_s: Seconds | None = 1800.0
    """Seconds that a start may take: set-up, loading the checkpoint, reading the data; `none`: no limit."""
    hang_save_s: Seconds | None = 1800.0
    """Seconds that a save or an evaluation may take; `none`: no limit."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval: PositiveInt | None = None
    """Steps between checkpoints; `none`: only at the end and on a stop request."""
    keep: PositiveInt | Literal["all"] = 2
    """Number of newest complete checkpoints to keep; older checkpoints are deleted; `all`: none is deleted."""
    asynchronous: bool = True
    """Write checkpoints in a background process while training continues."""
    load: Text | None = None
    """Checkpoint, or folder of checkpoints, to start from if the run has none of its own; `none`: random weights."""
    weights: Literal["all", "adapters"] = "all"
    """Weights in each checkpoint; `adapters`: only low-rank adapters and a scalar head; the frozen base weights are
    read from `load` whenever such a checkpoint is read."""
    load_optimizer: bool = True
    """Also load optimizer, schedule and data position from `load`, if the same program wrote it; false: only the
    weights. From another program's checkpoint (RL from SFT) only the weights are loaded, and steps begin at 0."""
    on_damaged: Literal["stop", "previous"] = "stop"
    """Reaction to a damaged newest checkpoint of the run; `stop`: the run ends; `previous`: resume from the newest
    intact checkpoint before it, and rename the damaged checkpoint, with a warning. Jobs of `mcore-rl launch` use
    `previous` unless the config sets the field."""
    allow_changes: tuple[Text, ...] = ()
    """Fields or sections in which a resume accepts changes of values, or of the content of files, that decide which
    data a step reads, or the random numbers, such as ["train.seed", "data"]; also fields or sections in which any start
    or resume accepts changes with which the loaded weights compute something else, such as ["model.rope.theta"]. All
    other changes are accepted and logged."""
    verify_checksums: bool = True
    """Compare a checkpoint with its checksums before it is loaded, on all ranks together; false: do not check it."""


class LogConfig(Section):
    """Metrics, events and samples of a run: where they are written, and how often."""

    interval: PositiveInt = 1
    """Steps between two log lines; each covers all steps since the previous line."""
    console: Literal["quiet", "normal", "verbose"] = "normal"
    """Lines of the log that the console shows too. `quiet` (-q): only warnings. `normal`: all except details of the
    machine. `verbose` (-v): all."""
    matrix_interval: PositiveInt | None = 20
    """Steps between two tables of the load by layer and expert in metrics.jsonl; `none`: no tables."""
    sinks: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"] | Extension, ...] = ("jsonl",)
    """Destinations of the metrics. `jsonl`: metrics.jsonl in `run_dir`, which is always written. `tensorboard`: events
    in `<run_dir>/tensorboard`. `wandb`, `mlflow`, `swanlab`, `trackio`: through their libraries, which read their own
    environment variables. `module:Class`: a class of your own."""
    project: Text = "mcore_rl"
    """Project in wandb, swanlab and trackio, experiment in mlflow."""
    entity: Text | None = None
    """Team or user in wandb, workspace in swanlab; `none`: the default of the account."""
    name: Text | None = None
    """Name of the run in these services; `none`: the last part of `run_dir`."""
    group: Text | None = None
    """Group of runs, such as the seeds of an experiment; `none`: no group."""
    tags: tuple[Text, ...] = ()
    """Tags of the run in wandb, mlflow and swanlab."""
    peak_tflops: PositiveFloat | Literal["auto"] = "auto"
    """Dense peak of a rank's device in TFLOP/s, for MFU; `auto`: looked up by name for a known GPU, measured at the
    start for another GPU; no MFU on CPUs, which other processes share."""


class RunConfig(Section):
    """The sections that all training programs have."""

    run_dir: str = "runs/run"
    """Output folder of the run; only one process may write to it."""
    platform: PlatformConfig = PlatformConfig()
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    trains_scores: ClassVar[bool] = False
    """Whether the program trains a model with a scalar head (`model.head` = "score") instead of logits."""
    units_between_collections: ClassVar[int] = 100
    """Units of work between two garbage collections, if `train.gc_interval` = "auto" has any."""
    unfuses_router: ClassVar[bool] = False
    """Whether the routers' choices are read or imposed, which a fused kernel hides; true in reinforcement learning."""
    trains_mtp: ClassVar[bool] = True
    """Whether passes go through the multi-token-prediction layers; false in reinforcement learning."""

    def decided(self, *, is_cuda: bool) -> Self:
        """Return the config with `platform.precision` decided, for ranks on GPUs or on CPUs."""
        return self.model_copy(update={"platform": self.platform.decided(is_cuda=is_cuda)})

    @cached_property
    def packed_length(self) -> int:
        """Maximum number of positions of a sequence, packed or not, in a forward pass."""
        raise NotImplementedError(f"{type(self).__name__} has no data")

    @cached_property
    def packed_multiple(self) -> int:
        """Multiple of packed sequences: context, sequence parallelism and 8-bit products cut them."""
        slices = self.mesh.cp * (self.mesh.tp if self.mesh.sequence_parallel else 1)
        return lcm(self.mesh.zigzag, slices * self.platform.fp8_multiple)

    @cached_property
    def critic_optim(self) -> OptimConfig | None:
        """Optimizer of a critic that is trained with the model; only reinforcement learning may have a critic."""
        return None

    @cached_property
    def critic_steps(self) -> int:
        """Optimizer steps of the critic in the whole run."""
        return 0

    @cached_property
    def server_wait_s(self) -> float:
        """Seconds that a step may wait for a server before it gives it up; only reinforcement learning has servers."""
        return 0.0

    @cached_property
    def update_store(self) -> Store:
        """Memory in which gradients and optimizer state wait between updates."""
        return "device"

    @cached_property
    def critic_store(self) -> Store:
        """Memory in which the critic waits between its passes and updates."""
        return "device"

    @cached_property
    def allows_te(self) -> bool:
        """Whether `platform.layers` = "auto" may choose TransformerEngine, which does not support adapters."""
        return not self.lora.is_on

    @cached_property
    def freezes_router(self) -> bool:
        """Whether the routers are frozen; only reinforcement learning has the choice (`rl.freeze_router`)."""
        return False


class PretrainConfig(RunConfig):
    """`mcore-rl pretrain`."""

    run_dir: str = "runs/pretrain"
    data: DataConfig = DataConfig()

    @cached_property
    def packed_length(self) -> int:
        """Number of positions of a sequence."""
        return self.data.seq_length
