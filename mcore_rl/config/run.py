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
    """Number format of weights and activations. Gradients and optimizer state have their own (`optim`), fp32 by
    default. `auto`: bf16 on GPUs, fp32 on CPUs. A run that resumes keeps the format it began with."""
    layers: Literal["auto", "te", "torch", "cpu"] = "auto"
    """Implementation of the layers. `te`: TransformerEngine. `torch`: plain PyTorch, the same code on GPUs and CPUs.
    `cpu`: the same layers compiled for a CPU, fp32 only; the first run builds them from C++ files in the user's cache.
    `auto`: on a GPU `te` if it is installed, without `lora` and, in RL, with servers for rollouts; on a CPU `cpu` if
    there is a compiler, each rank has one thread and the precision is fp32; else `torch`. A run that resumes keeps the
    layers it began with."""
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """Format of 8-bit matrix products; `none`: no 8-bit products. Needs layers = "te"."""
    fp8_recipe: Literal["auto", "delayed", "tensorwise", "blockwise", "mxfp8"] = "auto"
    """Scaling factors of `fp8`. `delayed`: a factor per tensor, from earlier steps. `tensorwise`: a factor per tensor,
    from its values. `blockwise`, `mxfp8`: a factor per block. `auto`: `mxfp8` on Blackwell, `blockwise` on Hopper, else
    `tensorwise`."""
    permute_fusion: bool | Literal["auto"] = "auto"
    """Sort tokens by expert in a single TransformerEngine kernel; `auto`: if it is installed and `layers` is `te`."""
    router_fusion: bool | Literal["auto"] = "auto"
    """Compute the routers' choices in a single TransformerEngine kernel; `auto`: as for `permute_fusion`, but never in
    RL, which records and imposes the choices."""
    cross_entropy_fusion: Literal["auto", "none", "native", "te"] = "auto"
    """Kernel of the cross entropy in pretraining and fine-tuning. `native`: Megatron's, which rounds the gradient of
    the logits to bf16. `te`: TransformerEngine's, which Megatron calls unstable. `none`: unfused. `auto`: `native` with
    bf16 and layers `te`, else `none`. Logits in chunks (`logits_chunk_tokens`) do not use it."""
    weight_gradient_fusion: bool | Literal["auto"] = "auto"
    """Let matrix products add weight gradients directly to the fp32 buffer. `auto`: if apex, which it needs, is
    installed, and `layers` is `te`."""
    deterministic: bool = False
    """Replace algorithms whose results depend on timing, or refuse those that have no replacement."""
    batch_invariant: bool = False
    """Compute each token independently of the rest of its batch, so that the native rollout engine and the trainer
    agree bit for bit. This is slow. On a GPU it needs `deterministic` and the package batch_invariant_ops."""
    bf16_products: bool = False
    """With layers `cpu`, round the operands of matrix products in linear layers and experts to bf16. Sums, weights,
    routers and everything else stay in fp32. This is faster on processors that multiply bf16."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes, which saves memory and takes time. `none`: all are kept.
    `selective`: those of the modules in `recompute_modules`. `full`: all, except those kept every `recompute_layers`
    layers."""
    recompute_modules: tuple[
        Literal["core_attn", "moe", "moe_act", "layernorm", "mla_up_proj", "mlp", "shared_experts"], ...
    ] = ("core_attn",)
    """Modules of a layer that `selective` recomputes."""
    recompute_layers: PositiveInt = 1
    """Number of layers between two activations that `full` keeps."""
    logits_chunk_tokens: PositiveInt | Literal["auto"] | None = "auto"
    """Number of positions whose logits a loss, or a pass for logprobs, has in memory at a time; the backward pass
    recomputes them. `auto`: all positions if their logits take at most 2 GiB in fp32 on a rank, else as many as take
    half a GiB. `none`: always all positions."""
    timeout_s: Seconds = 600.0
    """Seconds that a collective may wait for other ranks; a longer wait ends the run."""

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
    """Number of optimizer steps of the whole run."""
    global_batch: PositiveInt = 8
    """Sequences per optimizer step, over all ranks; in RL completions, in trainings on preferences pairs."""
    micro_batch: PositiveInt = 1
    """Sequences per forward pass on a rank; RL has rl.update.max_tokens_per_microbatch instead."""
    ramp_start: PositiveInt | None = None
    """Sequences per step at the start of a batch-size ramp; `none` (also in the next two fields): no ramp."""
    ramp_increment: PositiveInt | None = None
    """Number of sequences that the ramp adds to the batch at a time."""
    ramp_samples: PositiveInt | None = None
    """Number of sequences trained on before the batch reaches `global_batch`."""
    seed: Seed = 1234
    """Seed of the initial weights, the order of the data, dropout and, in RL, sampling."""
    eval_interval: PositiveInt | None = None
    """Steps between evaluations; `none`: a single evaluation, at the end."""
    eval_batches: PositiveInt | None = 4
    """Number of batches of `global_batch` sequences per evaluation; `none`: no evaluation."""
    gc_interval: PositiveInt | Literal["auto"] | None = "auto"
    """Units of work (in RL: rollout batches with their updates) between two garbage collections of Python. All ranks
    collect at the same time, also before evaluations and checkpoints. `auto`: 100 on GPUs with several ranks (1 in RL),
    else `none`. `none`: Python collects when it decides."""
    max_skipped: NonNegativeInt = 10
    """Maximum number of consecutive steps skipped for a loss or gradient that is not finite; one more ends the run."""
    hang_s: Seconds | Literal["auto"] | None = "auto"
    """Seconds that a step (in RL: a rollout batch and its updates) may take. A run that takes longer counts as hung and
    is ended, so that it can resume from its last checkpoint. `auto`: ten times the longest step of this start, at least
    300 s, and `hang_start_s` for the first two steps; with servers, at least as long as their time limits. `none`: no
    limit."""
    hang_start_s: Seconds | None = 1800.0
    """Seconds that a start may take: setup, loading the checkpoint, reading the data; `none`: no limit."""
    hang_save_s: Seconds | None = 1800.0
    """Seconds that a save or an evaluation may take; `none`: no limit."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval: PositiveInt | None = None
    """Steps between checkpoints; `none`: only at the end and when the run is asked to stop."""
    keep: PositiveInt | Literal["all"] = 2
    """Number of newest complete checkpoints to keep; older checkpoints are deleted. `all`: keep all."""
    asynchronous: bool = True
    """Write checkpoints in a background process while training continues."""
    load: Text | None = None
    """Checkpoint, or folder of checkpoints, to start from; a run that has checkpoints of its own resumes from them
    instead. `none`: the weights of `model.path`, or random weights without it."""
    weights: Literal["all", "adapters"] = "all"
    """Weights in each checkpoint. `adapters`: only low-rank adapters and a scalar head; whoever reads such a checkpoint
    also needs the frozen base weights in `load`."""
    load_optimizer: bool = True
    """Also load optimizer, schedule and data position from `load`; false: only the weights. From a checkpoint of
    another program (as in RL after SFT) only the weights are loaded, and steps begin at 0."""
    on_damaged: Literal["stop", "previous"] = "stop"
    """Reaction if the newest checkpoint of the run is damaged. `stop`: the run ends. `previous`: the run renames it,
    warns, and resumes from the newest intact checkpoint before it. `mcore-rl launch` uses `previous` unless the config
    sets the field."""
    allow_changes: tuple[Text, ...] = ()
    """Fields or sections in which changes are accepted that would otherwise be refused. On a resume: changes of values
    or file contents that decide which data a step reads or its random numbers, such as ["train.seed", "data"]. On any
    start: changes that make the loaded weights compute something else, such as ["model.rope.theta"]. All other changes
    are accepted anyway, and logged."""
    verify_checksums: bool = True
    """Compare a checkpoint with its checksums before loading it; the ranks share the work. false: do not check it."""


class LogConfig(Section):
    """Metrics, events and samples of a run: where they are written, and how often."""

    interval: PositiveInt = 1
    """Steps between log lines; each line covers all steps since the previous line."""
    console: Literal["quiet", "normal", "verbose"] = "normal"
    """Lines of the log that the console shows. `quiet` (-q): only warnings. `normal`: all except details of the
    machine. `verbose` (-v): all."""
    matrix_interval: PositiveInt | None = 20
    """Steps between tables of the load by layer and expert in metrics.jsonl; `none`: no tables."""
    sinks: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"] | Extension, ...] = ("jsonl",)
    """Destinations of the metrics. `jsonl`: metrics.jsonl in `run_dir`, which is always written. `tensorboard`: events
    in `<run_dir>/tensorboard`. `wandb`, `mlflow`, `swanlab`, `trackio`: through their libraries, which read their own
    environment variables. `module:Class`: a class of your own."""
    project: Text = "mcore_rl"
    """Project in wandb, swanlab and trackio; experiment in mlflow."""
    entity: Text | None = None
    """Team or user in wandb, workspace in swanlab; `none`: the account's default."""
    name: Text | None = None
    """Name of the run in the services of `sinks`; `none`: the last part of `run_dir`."""
    group: Text | None = None
    """Name of a group of runs, such as the seeds of an experiment; `none`: no group."""
    tags: tuple[Text, ...] = ()
    """Tags of the run in wandb, mlflow and swanlab."""
    peak_tflops: PositiveFloat | Literal["auto"] = "auto"
    """Dense peak of a rank's device in TFLOP/s, from which MFU is computed. `auto`: looked up by name for a known GPU,
    measured at the start for another GPU; no MFU on CPUs, which other processes share."""


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
    """The config of `mcore-rl pretrain`."""

    run_dir: str = "runs/pretrain"
    data: DataConfig = DataConfig()

    @cached_property
    def packed_length(self) -> int:
        """Number of positions of a sequence."""
        return self.data.seq_length
