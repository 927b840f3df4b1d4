"""Megatron's layer specs, with our modules or TransformerEngine's."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import zip_longest
from typing import Any, ClassVar

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from mcore_rl.config.model import LayerKind, Mixer
from mcore_rl.megatron.patches.gpu_packages import as_experts_entry, with_moe_layer
from mcore_rl.model.layers import linear
from mcore_rl.model.layers.attention import SDPAttention
from mcore_rl.model.layers.experts import GroupedExperts
from mcore_rl.model.layers.moe import MoELayer

CPU = "mcore_rl.model.layers.cpu.self_attention"
DELTA = "mcore_rl.model.layers.delta"
INDEXED = "mcore_rl.model.layers.indexed"
"""Modules of layers that few runs have, imported for a model that has them."""


class TorchSpecProvider(LocalSpecProvider):
    """Provider of Megatron's linear layers with our norm, attention and experts, for CPUs and CUDA without TE."""

    norm: ClassVar[type[linear.RMSNorm]] = linear.RMSNorm
    zero_centered_norm: ClassVar[type[linear.ZeroCenteredRMSNorm]] = linear.ZeroCenteredRMSNorm
    attention: ClassVar[type[SDPAttention]] = SDPAttention
    self_attention: ClassVar[type[SelfAttention]] = SelfAttention
    output_layer: type[linear.OutputLayer] = linear.OutputLayer

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """Return our norm, which marks its weight for sequence parallelism."""
        return self.zero_centered_norm if self.config.layernorm_zero_centered_gamma else self.norm

    def core_attention(self) -> type:
        """Return attention with all features that families need."""
        return self.attention

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        """Return experts that use grouped matrix products."""
        return as_experts_entry(GroupedExperts)


class LatentNorm(linear.RMSNorm):
    """Norm of a latent with its own epsilon; Megatron passes the same epsilon to all norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config=config, hidden_size=hidden_size, eps=config.latent_norm_eps)


def provider_of(config: TransformerConfig) -> TorchSpecProvider:
    """Return the provider for `platform.layers`, but for "te": Megatron's own specs have TransformerEngine's layers."""
    provider: TorchSpecProvider = (
        import_module(CPU).CpuSpecProvider(config) if config.layers == "cpu" else TorchSpecProvider(config)
    )
    return provider


def block_spec(config: TransformerConfig, *, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the specs of the layers in this rank's chunk `vp_stage`."""
    if config.layers == "te":
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    kinds = layer_kinds(config)[first : first + count]
    # Its choice of keys would be in another chunk; checks/mesh.py refuses meshes that do this.
    assert not kinds or kinds[0].mixer != "shared", (
        f"layer {first}, which takes the keys that a layer before it chooses, begins a chunk of {count} layers"
    )
    pairs = list(zip(kinds, choice_slots([kind.mixer for kind in kinds]), strict=True))
    specs = {pair: _layer_spec(config, *pair) for pair in set(pairs)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[pair] for pair in pairs], layer_norm=provider_of(config).layer_norm()
    )


def mtp_spec(config: TransformerConfig, *, vp_stage: int | None) -> Any:
    """Return the spec of the multi-token-prediction layers in this rank's chunk `vp_stage`; None without any."""
    if not config.mtp_num_layers:
        return None
    if config.layers == "te":
        last = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        layer = last.layer_specs[-1] if last.layer_specs else None
        return gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=True, vp_stage=vp_stage)
    mixer: Mixer = "attention" if config.indexer.top_k is None else "indexed"
    layer = _layer_spec(config, LayerKind(mixer, layer_kinds(config)[-1].is_moe), None)
    return gpt_layer_specs.get_gpt_mtp_block_spec_for_backend(config, layer, provider_of(config), vp_stage=vp_stage)


def output_layer(config: TransformerConfig) -> type[linear.OutputLayer]:
    """Return the class of the output layer; TransformerEngine's layers use it as well."""
    return linear.OutputLayer if config.layers == "te" else provider_of(config).output_layer


def layer_kinds(config: TransformerConfig) -> list[LayerKind]:
    """Return the kind of each layer of the whole model."""
    count, routed = config.num_layers, config.moe_layer_freq
    is_moe = [bool(layer) for layer in routed] if isinstance(routed, list) else [True] * count
    if config.num_moe_experts is None:
        is_moe = [False] * count
    return list(map(LayerKind, config.mixers, is_moe))


def choice_slots(mixers: Sequence[Mixer]) -> list[int | None]:
    """Return, for each layer of a chunk, the index of its choice of keys among those that layers share, else None."""
    slots: list[int | None] = []
    count = 0
    for mixer, behind in zip_longest(mixers, mixers[1:]):  # a chunk may have no layers
        if mixer == "indexed" and behind == "shared":
            count += 1
        is_shared = mixer == "shared" or (mixer == "indexed" and behind == "shared")
        slots.append(count - 1 if is_shared else None)
    return slots


def _layer_spec(config: TransformerConfig, kind: LayerKind, slot: int | None) -> ModuleSpec:
    provider, is_moe = provider_of(config), kind.is_moe
    norm = provider.layer_norm()
    if kind.mixer == "delta":
        mixer, renamed = _delta_net(provider)
    else:
        mixer, renamed = (_latent if config.multi_latent_attention else _grouped_query)(config, provider)
    if kind.mixer in ("indexed", "shared"):
        indexed = import_module(INDEXED)
        mixer = ModuleSpec(
            module=indexed.IndexedLatentAttention,
            params={**mixer.params, "has_indexer": kind.mixer == "indexed", "slot": slot},
            submodules=replace(mixer.submodules, core_attention=indexed.attention_over_choices(provider.attention)),
        )
    if not is_moe:
        renamed["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    mlp: Any = gpt_layer_specs.get_mlp_module_spec_for_backend(
        backend=provider, num_experts=config.num_moe_experts if is_moe else None, moe_grouped_gemm=True
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=mixer,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=with_moe_layer(mlp, MoELayer) if is_moe else mlp,
        mlp_bda=get_bias_dropout_add,
        # TransformerEngine fuses these norms into the following linear layer; our checkpoints use its names, so each
        # implementation can read checkpoints of the other.
        sharded_state_dict_keys_map=renamed,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _grouped_query(config: TransformerConfig, provider: TorchSpecProvider) -> tuple[ModuleSpec, dict[str, str]]:
    query_norm, key_norm = IdentityOp, IdentityOp
    if config.qk_layernorm:
        norm = provider.layer_norm()
        query_norm, key_norm = (linear.FullQueryNorm, linear.FullKeyNorm) if config.full_qk_norm else (norm, norm)
    spec = ModuleSpec(
        module=provider.self_attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )
    return spec, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _delta_net(provider: TorchSpecProvider) -> tuple[ModuleSpec, dict[str, str]]:
    delta = import_module(DELTA)
    submodules = delta.DeltaSubmodules(
        in_proj=provider.column_parallel_linear(), out_proj=provider.row_parallel_linear()
    )
    spec = ModuleSpec(module=delta.GatedDeltaNet, params={"submodules": submodules})
    return spec, {"input_layernorm.": "self_attention.in_proj.layer_norm_"}


def _latent(config: TransformerConfig, provider: TorchSpecProvider) -> tuple[ModuleSpec, dict[str, str]]:
    column = provider.column_parallel_linear()
    spec = ModuleSpec(
        module=linear.LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            # LatentAttention replaces the down-projections.
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=column,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=column,
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            # Megatron 0.19 refuses a norm that would not be used.
            q_layernorm=LatentNorm if config.q_lora_rank else IdentityOp,
            kv_layernorm=LatentNorm,
        ),
    )
    return spec, {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }
