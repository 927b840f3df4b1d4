"""The optimizer and its schedule."""

import math
from functools import cached_property
from importlib.metadata import distributions
from platform import python_version
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.section import Probability, Section, Text

Rank = Annotated[int, Field(gt=0, le=10_000)]
Target = Literal["attention", "mlp", "shared_experts", "experts"]
TARGETS: tuple[Target, ...] = ("attention", "mlp", "shared_experts", "experts")
"""Modules that may have adapters, in the order in which they are reported."""


class LoraConfig(Section):
    """Low-rank adapters: each target matrix W becomes W + scale * B A, and only A and B are trained."""

    rank: Rank | None = None
    """Rank of the adapters (rows of A, columns of B); `none`: no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale: `alpha` / rank of the adapter."""
    rslora: bool = False
    """Divide `alpha` by the square root of the rank instead of the rank (arXiv 2312.03732)."""
    targets: tuple[Target, ...] | Literal["auto"] = "auto"
    """Modules that get adapters: the projections of `attention`, the `mlp` of dense layers, `shared_experts`, and the
    routed `experts`, each expert with its own. `auto`: all of these that the model has."""
    expert_rank: Rank | Literal["auto"] = "auto"
    """Rank of the adapters of routed experts; `auto`: `rank` / experts per token, at least 1."""
    expert_gate_up: Literal["fused", "split"] = "fused"
    """Matrix A of a routed expert's gate and up-projection. `fused`: both share it, as with PEFT's `target_parameters`.
    `split`: each has its own, as with PEFT's modules for each expert."""
    load: Text | None = None
    """Folder with adapters to start from, in the format of the peft library. Its targets, ranks and scales must be
    those of this section; `none`: new adapters, or those in `checkpoint.load`."""

    def targets_in(self, model: ModelConfig) -> tuple[Target, ...]:
        """Return the modules of `model` that get adapters."""
        if self.rank is None:
            return ()
        return present(model) if self.targets == "auto" else self.targets

    def rank_of(self, target: Target, model: ModelConfig) -> int:
        """Return the rank of the adapters of `target`."""
        assert self.rank is not None
        if target != "experts":
            return self.rank
        return max(1, self.rank // model.moe.top_k) if self.expert_rank == "auto" else self.expert_rank

    def scale_of(self, rank: int) -> float:
        """Return the factor on B A for adapters of this rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @cached_property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank is not None


PLACES: dict[str, Target] = {
    ".self_attention.": "attention",
    ".mlp.shared_experts.": "shared_experts",
    ".mlp.experts.": "experts",
    ".mlp.": "mlp",
}
"""Substring of a layer's name -> the kind of module that it is in; more specific substrings come first."""


def target_of(name: str) -> Target | None:
    """Return the kind of module that a parameter or layer of this name is in; None if adapters do not apply to it."""
    return next((target for part, target in PLACES.items() if part in name), None)


def present(model: ModelConfig) -> tuple[Target, ...]:
    """Return the kinds of modules that the model's layers contain."""
    has: dict[Target, bool] = {
        "attention": True,
        "mlp": not all(model.moe_layers),
        "shared_experts": model.is_moe and model.moe.shared_experts > 0,
        "experts": model.is_moe,
    }
    return tuple(target for target in TARGETS if has[target])


State = Literal["fp32", "bf16"]
"""Number format of a part of the optimizer's state."""
STATE_BYTES: dict[State, int] = {"fp32": 4, "bf16": 2}
"""Bytes per number of each format."""


MUON_NEEDS = {"megatron-core": "0.19", "emerging-optimizers": "0.3"}
"""Packages of Muon with the versions that fit each other; emerging-optimizers 999.9.9 is an empty placeholder."""


def absent_muon(field: str = "optim") -> str:
    """Return a sentence on what this Python lacks for Muon, or an empty string."""
    found = {name: next((part.version for part in distributions(name=name)), "missing") for name in MUON_NEEDS}
    if all(found[name].startswith(f"{needed}.") for name, needed in MUON_NEEDS.items()):
        return ""
    return (
        f'{field}.kind="muon" needs Python 3.12 with megatron-core 0.19 and emerging-optimizers 0.3; in this Python '
        f"{python_version()} they are {' and '.join(found.values())}. Make an environment of Python 3.12 with `pip "
        f"install 'mcore-rl[muon]'`, or set {field}.kind=\"adam\"."
    )


class MuonConfig(Section):
    """Muon (arXiv 2502.16982): a matrix moves by its momentum, made orthogonal by a Newton-Schulz iteration."""

    momentum: Probability = 0.95
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Orthogonalize a mix of the gradient and its running mean (Nesterov), instead of the running mean alone."""
    num_ns_steps: PositiveInt = 5
    """Number of steps of the Newton-Schulz iteration."""
    coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    """Coefficients of the Newton-Schulz iteration."""
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor on the update of a matrix of m rows and n columns. `spectral`: sqrt(max(m, n)). `unit_rms_norm`: sqrt(m /
    n). `shape_scaling`: sqrt(max(1, m / n))."""
    extra_scale_factor: PositiveFloat = 0.2
    """Further factor on the update; 0.2 with `spectral` makes updates as large as Adam's, so that its `lr` and
    `weight_decay` fit."""
    fp32_matmul_prec: Literal["highest", "high", "medium"] = "highest"
    """Precision of the iteration's matrix products. `highest`: fp32. `high`: TF32 where a GPU has it. `medium`: bf16,
    which changes an update by 0.5 %."""
    router: bool = False
    """Also update the routers' matrices with Muon, instead of Adam."""


class OptimConfig(Section):
    """AdamW (Adam with decoupled weight decay) in Megatron's distributed optimizer, on every mesh; or Muon."""

    kind: Literal["adam", "muon"] = "adam"
    """Optimizer. `muon`: Muon (section `muon`), with weight decay, for matrices, and Adam for embeddings, output layer,
    routers, norms and biases. Every data-parallel rank then holds the whole state. Needs Python 3.12 with Megatron-Core
    0.19 and the package emerging-optimizers 0.3."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate, reached after the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. `wsd`: constant, then a decay over `wsd_decay_steps` (arXiv 2404.06395)."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps of linear warm-up: step 1 uses lr / warmup_steps, step warmup_steps uses lr; 0: no warm-up."""
    decay_steps: PositiveInt | Literal["auto"] = "auto"
    """Step at which the decay ends; `auto`: the run's last step."""
    wsd_decay_steps: PositiveInt | Literal["auto"] = "auto"
    """Number of steps of the decay of `wsd`; `auto`: a tenth of the run."""
    wsd_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the decay of `wsd`."""
    beta1: Probability = 0.9
    """Decay of the running mean of the gradient, per step."""
    beta2: Probability = 0.95
    """Decay of the running mean of the squared gradient, per step."""
    eps: PositiveFloat = 1e-8
    """Number added to the square root of the running mean of squares, against division by zero."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; vectors (norms, biases) have none."""
    decay_embeddings: bool = True
    """Apply weight decay also to the embedding and output matrices."""
    decay_qk_norms: bool = False
    """Apply weight decay also to the norms of queries and keys."""
    clip_grad: PositiveFloat | None = 1.0
    """Maximum global L2 norm of the gradient; a larger gradient is scaled down to it. `none`: no clipping."""
    offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the optimizer's state (fp32 weights and moments) that stays in main memory and is updated by the CPU
    (Megatron's hybrid optimizer). It takes 16 bytes of main memory per weight of a rank's share. Needs
    platform.precision = "bf16"."""
    offload_overlap: bool = True
    """With `offload_fraction`, transfer gradients and weights while the CPU updates other weights."""
    exp_avg_dtype: State = "fp32"
    """Number format of the running mean of the gradient between steps; a step computes in fp32 (Megatron's
    precision-aware optimizer). bf16 needs platform.precision = "bf16"."""
    exp_avg_sq_dtype: State = "fp32"
    """Number format of the running mean of squares, as `exp_avg_dtype`. bf16 has 8 bits of precision: changes of less
    than 0.4 % are lost."""
    main_grads_dtype: State = "fp32"
    """Number format in which gradients are summed over microbatches and ranks. bf16 halves their memory and messages,
    but makes the third digit of sums depend on the mesh; it needs platform.precision = "bf16"."""
    muon: MuonConfig = MuonConfig()

    @cached_property
    def is_sharded(self) -> bool:
        """Whether each data-parallel rank has a share of the state and updates a share of the weights."""
        return self.kind == "adam"

    @cached_property
    def is_precision_aware(self) -> bool:
        """Whether gradients or part of the optimizer's state have fewer than 32 bits."""
        return {self.exp_avg_dtype, self.exp_avg_sq_dtype, self.main_grads_dtype} != {"fp32"}

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of a weight."""
        return STATE_BYTES[self.main_grads_dtype]

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of both moments of a weight; of the only one that Muon has of a matrix."""
        return STATE_BYTES[self.exp_avg_dtype] + (STATE_BYTES[self.exp_avg_sq_dtype] if self.kind == "adam" else 0)
