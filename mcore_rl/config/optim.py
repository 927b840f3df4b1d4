"""The optimizer and its schedule."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from mcore_rl.config.section import Probability, Section


class OptimConfig(Section):
    """Adam with decoupled weight decay (AdamW), Megatron's distributed optimizer on every mesh."""

    lr: PositiveFloat = 3e-4
    """Highest learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warm-up. `wsd`: constant, then a decay over `wsd_decay_steps` (arXiv 2404.06395)."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    decay_steps: NonNegativeInt = 0
    """Step at which the decay ends; 0: the run's last step."""
    wsd_decay_steps: NonNegativeInt = 0
    """Length of the decay of `wsd`; 0: a tenth of the run."""
    wsd_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the decay of `wsd`."""
    beta1: Probability = 0.9
    """Decay of the running mean of the gradient."""
    beta2: Probability = 0.95
    """Decay of the running mean of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the latter."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled; not applied to vectors (norms, biases) nor, unless asked, to embeddings."""
    decay_embeddings: bool = True
    """Whether the embedding and output matrices decay."""
    decay_qk_norms: bool = False
    """Whether the query and key norms decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""
