"""Megatron's distributed Adam and its learning-rate schedule from a config."""

from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import nn

from mcore_rl.backend.platform import Platform
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import OptimConfig

STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
QK_NORMS = ("q_layernorm.", "k_layernorm.")


def build_optimizer(
    config: OptimConfig, mesh: MeshConfig, platform: Platform, chunks: Sequence[nn.Module]
) -> MegatronOptimizer:
    """Collective over the world: build AdamW over `chunks`, its state sharded over the data-parallel ranks."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad or 0.0,  # Megatron clips nothing at 0
        bf16=platform.dtype == torch.bfloat16,
        params_dtype=platform.dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=mesh.overlap_param_gather,
        # A constant scale of 1 changes no gradient; it turns on Megatron's check for gradients that are not finite.
        loss_scale=1.0,
    )
    undecayed = ParamWithNamePredicate(
        name="undecayed", fn=lambda param, name: not decays(config, param, name)
    )
    overrides = {ParamKey(with_name_predicate=undecayed): ParamGroupOverride(wd_mult=0.0)}
    return get_megatron_optimizer(settings, list(chunks), config_overrides=overrides)


def decays(config: OptimConfig, param: torch.Tensor, name: str) -> bool:
    """Return whether weight decay applies: to matrices always, to embeddings and query/key norms by the config."""
    if any(norm in name for norm in QK_NORMS):
        return config.decay_qk_norms
    if name.endswith(EMBEDDINGS):
        return config.decay_embeddings
    return param.dim() > 1


def build_schedule(config: OptimConfig, optimizer: MegatronOptimizer, steps: int) -> OptimizerParamScheduler:
    """Build the learning rate of every step: linear warm-up from zero, then the schedule, in optimizer steps."""
    wsd_decay_steps = max(1, steps // 10) if config.wsd_decay_steps == "auto" else config.wsd_decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=steps if config.decay_steps == "auto" else config.decay_steps,
        lr_decay_style=STYLES[config.schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=config.wsd_shape,
        # A resumed run keeps the position in the schedule, but the shape is what the config says now.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
