"""Megatron's TransformerConfig for a model on a mesh and a platform."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.speed import Kernel, Machine, SpeedFlags, speed_flags
from mcore_rl.errors import ConfigError
from mcore_rl.families import family_of, te_violations
from mcore_rl.families.family import yarn
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.patches.gpu_packages import has_module
from mcore_rl.megatron.platform import Platform

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}
"""Activation functions by name; families use names because they do not import torch."""

PERMUTE_KERNELS = (
    *("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index"),
    *("fused_sort_chunks_by_index_with_probs", "fused_unpermute"),
)
"""Megatron's names of the TransformerEngine kernels that permute tokens; it needs all of them or uses none."""
ROUTER_KERNELS = ("fused_topk_with_score_function", "fused_moe_aux_loss")
"""Megatron's names of the TransformerEngine kernels that the fused router needs."""


def transformer_config(
    model: ModelConfig, mesh: Mesh, platform: Platform, settings: PlatformConfig
) -> TransformerConfig:
    """Return the config of this rank's chunks, for a checked run; ConfigError for layers that it lacks."""
    family = family_of(model)
    if platform.layers == "te" and (reasons := list(te_violations(model, mesh.config, settings))):
        raise ConfigError(reasons[0])
    arguments = (
        _common(model)
        | family.architecture(model)
        | _parallel(model, mesh, platform)
        | _numeric(platform, settings)
        | _fusions(platform, settings, speed_flags(settings, mesh.config, model, machine_of(platform)))
        | _recompute(settings)
    )
    if model.is_moe:
        arguments |= _dispatch(model, platform)
    arguments["activation_func"] = ACTIVATIONS[family.activation]
    # TransformerEngine's experts do not support this fusion together with biases.
    arguments["bias_dropout_fusion"] &= not arguments["add_bias_linear"]
    # Megatron's fused kernel for latent attention only supports YaRN; the one for grouped queries drops YaRN's factor
    # on queries and keys if sequences are packed.
    arguments["apply_rope_fusion"] = platform.layers == "te" and family.is_latent == (model.rope.scaling == "yarn")
    config = MLATransformerConfig(**arguments) if family.is_latent else TransformerConfig(**arguments)
    # Our layers and Megatron's YaRN read these as plain attributes: the config has no fields for them.
    config.layers = platform.layers
    config.rounds_products = platform.rounds_products
    config.mixers = model.mixers
    config.indexer = model.indexer
    config.index_in_pairs = family.has_interleaved_indexer
    config.full_qk_norm = family.has_full_qk_norm
    config.experts_in_group_score = family.own_group_score(model)
    config.latent_norm_eps = model.mla.norm_eps
    if model.rope.scaling == "yarn" and not family.is_latent:
        for name, value in yarn(model).items():
            setattr(config, name, value)
    return config


def _common(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_std,
        "mtp_num_layers": model.mtp_layers or None,
        "mtp_loss_scaling_factor": model.mtp_loss_coeff,
        # A loss is a sum and a count, divided once by the world's number of tokens.
        "calculate_per_token_loss": True,
    }


def _parallel(model: ModelConfig, mesh: Mesh, platform: Platform) -> dict[str, Any]:
    config = mesh.config
    if config.overlap_tp and platform.layers != "te":
        raise ConfigError(
            "mesh.overlap_tp=true needs the layers of TransformerEngine, and those here are of torch. Install it, or "
            "set mesh.overlap_tp=false."
        )
    overlap = config.vpp > 1 and config.overlap_p2p
    layout: list[list[str]] | None = None  # stages of equal chunks
    if config.pp_layout is not None:
        # The contents of each chunk in the model's order, by Megatron's names.
        layout = [["decoder"] * count for count in config.chunk_layers(model.num_layers, model.mtp_layers)]
        layout[0].insert(0, "embedding")
        layout[-1] += ["mtp"] * model.mtp_layers + ["loss"]
    return {
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "virtual_pipeline_model_parallel_size": config.vpp if config.vpp > 1 else None,
        "expert_model_parallel_size": config.ep,
        "expert_tensor_parallel_size": config.etp,
        "context_parallel_size": config.cp,
        "sequence_parallel": mesh.sequence_parallel,
        "tp_comm_overlap": config.overlap_tp,
        "num_layers_in_first_pipeline_stage": config.first_stage_layers,
        "num_layers_in_last_pipeline_stage": config.last_stage_layers,
        "pipeline_model_parallel_layout": layout,
        "overlap_p2p_comm": overlap,
        # Two batched messages between the same two ranks (pp = 2, interleaved) would be confused with each other.
        "batch_p2p_comm": not overlap,
    }


def _numeric(platform: Platform, settings: PlatformConfig) -> dict[str, Any]:
    te = platform.layers == "te"
    return {
        "params_dtype": platform.dtype,
        "pipeline_dtype": platform.dtype,
        "bf16": platform.dtype == torch.bfloat16,
        "deterministic_mode": settings.deterministic,
        # gloo sends from the tensor itself, asynchronously: a freed output would arrive as garbage.
        "deallocate_pipeline_outputs": platform.is_cuda,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "cp_comm_type": "p2p" if te else None,
        "transformer_impl": "transformer_engine" if te else "local",
    }


def _fusions(platform: Platform, settings: PlatformConfig, flags: SpeedFlags) -> dict[str, Any]:
    machine, te = machine_of(platform), platform.layers == "te"
    asked: tuple[tuple[str, bool, Kernel, str], ...] = (
        ("permute_fusion", flags.permute_fusion, "permute", "TransformerEngine 2.1 or later"),
        ("router_fusion", flags.router_fusion, "router", "TransformerEngine 2.7 or later"),
        ("weight_gradient_fusion", flags.weight_gradient_fusion, "weight gradient", "apex, built with its extensions"),
    )
    for name, is_on, kernel, package in asked:
        if is_on and not (te and kernel in machine.kernels):
            raise ConfigError(
                f"platform.{name}=true needs TransformerEngine's layers and a kernel of {package}, which is not here. "
                f'Install it, or set platform.{name}="auto".'
            )
    if flags.cross_entropy_fusion == "te" and not te:
        raise ConfigError(
            'platform.cross_entropy_fusion="te" needs the layers of TransformerEngine, and those here are of torch. '
            'Set it to "auto".'
        )
    fp8: dict[str, Any] = {"fp8": settings.fp8, "fp8_recipe": flags.fp8_recipe} if settings.fp8 != "none" else {}
    return fp8 | {
        "gradient_accumulation_fusion": flags.weight_gradient_fusion,
        "cross_entropy_loss_fusion": flags.cross_entropy_fusion != "none",
        "cross_entropy_fusion_impl": "te" if flags.cross_entropy_fusion == "te" else "native",
        "moe_shared_expert_overlap": flags.overlap_shared_experts,
        "moe_permute_fusion": flags.permute_fusion,
        # The fused router returns before the hook of routing replay; RL switches it off where it observes routers.
        "moe_router_fusion": flags.router_fusion,
    }


def machine_of(platform: Platform) -> Machine:
    """Return the properties that "auto" flags depend on, for a rank of a run."""
    has_te_layers = platform.layers == "te"
    return machine_here(platform.device, has_te_layers=has_te_layers, world_size=platform.world_size)


def machine_here(device: torch.device, *, has_te_layers: bool, world_size: int) -> Machine:
    """Return the properties that "auto" flags depend on, for this process."""
    # Older versions of TransformerEngine lack some kernels; Megatron then sets their names to None.
    kernels: dict[Kernel, bool] = {
        "permute": has_kernels(*PERMUTE_KERNELS),
        "router": has_kernels(*ROUTER_KERNELS),
        "weight gradient": has_module("fused_weight_gradient_mlp_cuda"),
    }
    return Machine(
        is_cuda=device.type == "cuda",
        has_te_layers=has_te_layers,
        world_size=world_size,
        kernels=frozenset(kernel for kernel, is_there in kernels.items() if is_there),
        capability=torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None,
    )


def _recompute(settings: PlatformConfig) -> dict[str, Any]:
    if settings.recompute == "none":
        return {}
    if settings.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(settings.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": settings.recompute_layers,
    }


def _dispatch(model: ModelConfig, platform: Platform) -> dict[str, Any]:
    moe = model.moe
    names = {"deepep": "HAVE_DEEP_EP", "hybridep": "HAVE_HYBRIDEP"}
    if moe.is_flex and not (platform.is_cuda and getattr(fused_a2a, names[moe.dispatcher])):
        branch = " of the branch hybrid-ep" if moe.dispatcher == "hybridep" else ""
        raise ConfigError(
            f'model.moe.dispatcher="{moe.dispatcher}" needs CUDA and the deep_ep package{branch}, which is not '
            'importable here. Use "alltoall".'
        )
    return {
        "moe_token_dispatcher_type": "flex" if moe.is_flex else moe.dispatcher,
        "moe_flex_dispatcher_backend": moe.dispatcher if moe.is_flex else "deepep",
    }


def has_kernels(*names: str) -> bool:
    """Return whether Megatron has imported all of these TransformerEngine kernels."""
    return all(getattr(moe_utils, name, None) is not None for name in names)
