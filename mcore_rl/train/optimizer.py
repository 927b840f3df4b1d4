"""Megatron's optimizer and its learning-rate schedule from a config."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from mcore_rl.config.optim import OptimConfig, absent_muon
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.platform import Platform

STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
BY_ADAM = (*EMBEDDINGS, "eh_proj.weight", "shared_experts.gate_weight")
"""Ends of names of matrices that Muon leaves to Adam: a model's input and output, MTP's projection, gates."""
QK_NORMS = ("q_layernorm.", "k_layernorm.")
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISION_AWARE = ("master_weights", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad")
"""Arguments of an Adam that supports 16-bit moments: TransformerEngine's since 2.1, and ours."""


def build_optimizer(
    config: OptimConfig, platform: Platform, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Collective over the world: build AdamW for `chunks`, with its state sharded over the data-parallel ranks, or Muon
    and AdamW with whole states. Raises ConfigError if this machine lacks what the config asks for.
    """
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad or 0.0,  # 0 turns clipping off in Megatron
        bf16=platform.dtype == torch.bfloat16,
        params_dtype=platform.dtype,
        use_distributed_optimizer=config.is_sharded,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        optimizer_cpu_offload=config.offload_fraction > 0,
        optimizer_offload_fraction=config.offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=config.offload_overlap,
        # Without it the fp32 weights stay on the device, in addition to their copies in main memory.
        use_precision_aware_optimizer=config.offload_fraction > 0,
        # A constant scale of 1 changes no gradient, but turns on Megatron's check for non-finite gradients.
        loss_scale=1.0,
    )
    if config.is_precision_aware:
        _be_precision_aware(settings, config)
    undecayed = ParamWithNamePredicate(name="undecayed", fn=lambda param, name: not decays(config, param, name))
    overrides = {ParamKey(with_name_predicate=undecayed): ParamGroupOverride(wd_mult=0.0)}
    if config.kind == "muon":
        if absent := absent_muon():
            raise ConfigError(absent)
        from mcore_rl.train.muon import build_muon  # needs Megatron-Core 0.19

        rest = ParamWithNamePredicate(name="rest", fn=lambda param, name: not by_muon(config, param, name))
        return build_muon(config, settings, chunks, overrides, ParamKey(with_name_predicate=rest))
    optimizer = get_megatron_optimizer(
        settings, list(chunks), config_overrides=overrides, use_gloo_process_groups=False
    )
    # If only experts are trained, Megatron chains a stub for the rest, which it cannot save or load.
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    return optimizer


def _be_precision_aware(settings: OptimizerConfig, config: OptimConfig) -> None:
    """Set the fields of Megatron's precision-aware optimizer, bypassing its check, which accepts only
    TransformerEngine's Adam. Raises ConfigError if the Adam on this machine supports only fp32 moments.
    """
    if not set(PRECISION_AWARE) <= inspect.signature(megatron_optimizer.Adam).parameters.keys():
        raise ConfigError(
            "optim.exp_avg_dtype, exp_avg_sq_dtype and main_grads_dtype need the Adam of TransformerEngine 2.1 or "
            f"later, or ours where neither it nor apex is installed, and Megatron has that of "
            f"{megatron_optimizer.Adam.__module__} here. Install TransformerEngine, or set all three to fp32."
        )
    values: dict[str, Any] = {
        "use_precision_aware_optimizer": True,
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8": True,
        # With fp32 weights split into a bf16 half and a remainder, Megatron would save the remainder as the weight.
        "store_param_remainders": False,
        "exp_avg_dtype": STATE_DTYPES[config.exp_avg_dtype],
        "exp_avg_sq_dtype": STATE_DTYPES[config.exp_avg_sq_dtype],
        "main_grads_dtype": STATE_DTYPES[config.main_grads_dtype],
    }
    for name, value in values.items():
        setattr(settings, name, value)


def initialize_moments(optimizer: MegatronOptimizer) -> None:
    """Create zero moments where no step has created any: Megatron cannot save missing moments, and would take a step
    with random gradients to create an offloaded optimizer's moments.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _initialize_offloaded(part.optimizer)
        elif part.config.use_precision_aware_optimizer:
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    if not part.optimizer.state[param]:
                        # Megatron's own call has one argument fewer than TransformerEngine expects.
                        part.optimizer.initialize_state(param, part.config.store_param_remainders)
        else:
            part.init_state_fn(part.optimizer, part.config)


def _initialize_offloaded(optimizer: HybridDeviceOptimizer) -> None:
    for inner in optimizer.sub_optimizers:
        for group in inner.param_groups:
            for param in group["params"]:
                state = inner.state[param]
                if not state:
                    state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                    if inner is not optimizer.gpu_optimizer:
                        state["step"] = torch.zeros((), dtype=torch.float32)  # as torch's AdamW keeps it
    optimizer._sync_sub_optimizers_state_to_hdo()


def settle_loaded_step(optimizer: MegatronOptimizer) -> None:
    """Move a hybrid optimizer's loaded step count to the groups of its device part: in its own groups it would
    overwrite the device part's count at every step, which would then never grow.
    """
    for part in optimizer.chained_optimizers:
        if not isinstance(part.optimizer, HybridDeviceOptimizer):
            continue
        steps = [group.pop("step") for group in part.optimizer.param_groups if "step" in group]
        if steps and part.optimizer.gpu_optimizer is not None:
            for group in part.optimizer.gpu_optimizer.param_groups:
                group["step"] = steps[0]


def decays(config: OptimConfig, param: torch.Tensor, name: str) -> bool:
    """Return whether weight decay applies: always to matrices, and to embeddings and query/key norms by the config.
    `param` may be a rank's part, with experts stacked in a tensor; `name` is its name in the chunk.
    """
    if any(norm in name for norm in QK_NORMS):
        return config.decay_qk_norms
    if name.endswith(EMBEDDINGS):
        return config.decay_embeddings
    return param.dim() > 1 and not _is_bias(name)


def _is_bias(name: str) -> bool:
    # By name, because stacked expert biases have two axes; TransformerEngine numbers them (bias0, bias1).
    return name.rpartition(".")[2].startswith("bias")


def by_muon(config: OptimConfig, param: torch.Tensor, name: str) -> bool:
    """Return whether Muon updates a parameter: matrices inside of layers, and stacks of experts' matrices. `param` may
    be a rank's part; `name` is its name in the chunk.
    """
    if name.endswith("router.weight"):
        return config.muon.router
    if name.endswith(BY_ADAM) or _is_bias(name):
        return False
    # Tensors with three axes are experts, whose gradients have a reduction of their own, or kernels of convolutions.
    return param.dim() == 2 or (param.dim() == 3 and not getattr(param, "allreduce", True))


def build_schedule(config: OptimConfig, optimizer: MegatronOptimizer, steps: int) -> OptimizerParamScheduler:
    """Build the learning-rate schedule: linear warm-up, then the configured shape, in optimizer steps. Step t = 1, 2,
    ... of a warm-up over W steps has rate lr x t / W. Megatron counts from 0, so `init_lr` = lr / W and
    `lr_warmup_steps` = W - 1.
    """
    wsd_decay_steps = max(1, steps // 10) if config.wsd_decay_steps == "auto" else config.wsd_decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / max(1, config.warmup_steps),
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=max(0, config.warmup_steps - 1),
        lr_decay_steps=steps if config.decay_steps == "auto" else config.decay_steps,
        lr_decay_style=STYLES[config.schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=config.wsd_shape,
        # A resumed run keeps its position in the schedule, but takes the shape from its current config.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
