"""The optimizer and its schedule."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.section import Probability, Section


class OptimConfig(Section):
    """Adam with decoupled weight decay (AdamW), Megatron's distributed optimizer on every mesh."""

    lr: PositiveFloat = 3e-4
    """Highest learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up; `wsd`: constant, then a decay over `wsd_decay_steps` (arXiv 2404.06395)."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from a learning rate of 0."""
    decay_steps: PositiveInt | Literal["auto"] = "auto"
    """Step at which the decay ends; `auto`: the run's last step."""
    wsd_decay_steps: PositiveInt | Literal["auto"] = "auto"
    """Steps of the decay of `wsd`; `auto`: a tenth of the run."""
    wsd_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the decay of `wsd`."""
    beta1: Probability = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Probability = 0.95
    """Decay of the running mean of the gradient's square."""
    eps: PositiveFloat = 1e-8
    """Number added to the square root of the running mean of squares."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; it is not applied to vectors (norms, biases)."""
    decay_embeddings: bool = True
    """Apply weight decay to the embedding and output matrices too."""
    decay_qk_norms: bool = False
    """Apply weight decay to the query and key norms too."""
    clip_grad: PositiveFloat | None = 1.0
    """Largest global L2 norm of the gradient, to which larger ones are scaled; `none`: no clipping."""
    offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the optimizer's state (fp32 weights and moments) that lies in main memory, where the processor
    updates it (Megatron's hybrid optimizer): 16 bytes of main memory for each weight of a rank's share. It needs
    platform.precision = "bf16"."""
    offload_overlap: bool = True
    """With `offload_fraction`, gradients and weights travel while the processor updates others."""
