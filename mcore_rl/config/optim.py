"""The optimizer and its schedule."""

from typing import Literal

from mcore_rl.config.section import Section


class OptimConfig(Section):
    """Adam with decoupled weight decay (AdamW), Megatron's distributed optimizer on every mesh."""

    lr: float = 3e-4
    """Highest learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warm-up. `wsd`: constant, then a decay over `wsd_decay_steps` (arXiv 2404.06395)."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    decay_steps: int = 0
    """Step at which the decay ends; 0: the run's last step."""
    wsd_decay_steps: int = 0
    """Length of the decay of `wsd`; 0: a tenth of the run."""
    wsd_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the decay of `wsd`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; not applied to vectors (norms, biases) nor, unless asked, to embeddings."""
    decay_embeddings: bool = True
    """Whether the embedding and output matrices decay."""
    decay_qk_norms: bool = False
    """Whether the query and key norms decay."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
