"""The base class of all model families: the properties of an architecture that the rest of the code needs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

from mcore_rl.config.model import ModelConfig, Switch
from mcore_rl.families import rules as weight_rules
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.weight_map import DuplicateTensor, WeightRule

OFF: tuple[Switch, ...] = ("off",)
OPTIONAL_SETTINGS = (
    *("mtp_layers", "rope.fraction", "sliding_window", "delta.full_every", "indexer.top_k", "moe.first_dense_layers"),
    *("moe.shared_experts", "moe.shared_ffn_hidden_size", "moe.num_groups", "moe.top_groups", "moe.routed_scaling"),
    *("moe.expert_bias",),
)
"""Fields of `ModelConfig` that only some families support; in all other families they keep their defaults."""
GROUPED_EXPERTS = (
    "moe.first_dense_layers",
    "moe.shared_experts",
    "moe.num_groups",
    "moe.top_groups",
    "moe.routed_scaling",
)
"""The optional settings of experts like DeepSeek's."""


class Family(ABC):
    """A Hugging Face architecture, as Megatron builds it.

    The attributes are properties that configs, checks, estimates and layers depend on; the methods make Megatron's
    arguments, pair the weights, and translate config.json. The defaults describe Llama. To add your own family,
    subclass this class or a built-in family's, and set `model.family` to `module:name`.
    """

    model_type: str
    """Hugging Face's name of the architecture, `model_type` in config.json."""
    hf_class: str
    """Class of transformers that opens an exported checkpoint."""
    has_score_class: bool = True
    """Whether transformers has a sequence-classification class for the family, which reward models need."""
    score_class: str | None = None
    """Name of that class; None if it is `hf_class` with the suffix replaced."""
    router: Literal["none", "softmax", "sigmoid"] = "none"
    """Function of the scores by which tokens choose experts; "none" for a dense family."""
    is_latent: bool = False
    """True for multi-head latent attention, which Megatron builds from its MLATransformerConfig."""
    qkv_bias: tuple[Switch, ...] = OFF
    """Whether queries, keys and values may have biases: the allowed settings, the default first."""
    qk_norm: tuple[Switch, ...] = OFF
    """Whether queries and keys may be normed: the allowed settings, the default first."""
    has_full_qk_norm: bool = False
    """True if these norms are over all heads at once, not over each head."""
    has_linear_bias: bool = False
    """True if attention's output projection, the router and the experts have biases (Megatron's `add_bias_linear`)."""
    has_attention_sinks: bool = False
    """True if every head has a learned score that takes part in the softmax (Megatron's learnable softmax)."""
    has_output_gate: bool = False
    """True if a sigmoid gate of each head's width scales the output of attention."""
    has_interleaved_indexer: bool = False
    """True if an indexer rotates neighbouring numbers of a head as pairs, not the halves of the rotated part."""
    has_zero_centered_norms: bool = False
    """True if norms multiply by 1 + weight; the norm inside a gated delta net always multiplies by its weight."""
    has_shared_expert_gate: bool = False
    """True if a sigmoid gate scales the output of the shared expert."""
    activation: Literal["silu", "quick_gelu"] = "silu"
    """Activation of the gated MLPs; `mcore_rl.model.transformer_config` has the functions."""
    settings: tuple[str, ...] = ()
    """Names of the `OPTIONAL_SETTINGS` that the family supports."""
    experts_in_group_score: int | None = None
    """A group of experts is ranked by the scores of this many best experts; None for a family without groups."""
    mtp_prefix: str | None = None
    """Name prefix of all tensors of MTP layers; None if they are numbered after the model's layers."""
    moe_names: weight_rules.MoENames = weight_rules.MoENames()
    """Hugging Face's names of the tensors in an MoE layer."""

    @abstractmethod
    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return ModelConfig's arguments, but `family`, by a config.json; ConfigError if Megatron's differs."""

    @abstractmethod
    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json beside or over the common ones; ConfigError if it has no such model."""

    def violations(self, model: ModelConfig) -> Iterator[str]:
        """Yield a sentence, with a remedy, for each setting that this family in particular refuses."""
        if self.has_shared_expert_gate and model.is_moe and model.moe.shared_experts != 1:
            yield (
                f"model.moe.shared_experts={model.moe.shared_experts}: {self.model_type} has one shared expert, "
                "whose width is model.moe.shared_ffn_hidden_size. Set it to 1."
            )

    def architecture(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's config for the family's layers."""
        if self.is_latent:
            arguments = latent_attention(model)
        else:
            arguments = {
                "num_attention_heads": model.num_heads,
                "num_query_groups": model.num_kv_heads,
                "kv_channels": model.head_dim,
                "add_qkv_bias": self.has_qkv_bias(model),
                "qk_layernorm": self.has_qk_norm(model),
            }
        if self.router != "none":
            arguments |= routed_experts(model)
        if self.router == "softmax":
            # Megatron's name for gates that are not normalized over the chosen experts.
            arguments["moe_router_pre_softmax"] = not model.moe.normalize_top_k
        if self.router == "sigmoid":
            arguments |= {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": model.moe.expert_bias,
                "moe_router_bias_update_rate": model.moe.expert_bias_rate,
            }
        if self.has_attention_sinks:
            arguments["softmax_type"] = "learnable"
        switches = {
            "add_bias_linear": self.has_linear_bias,
            "moe_shared_expert_gate": self.has_shared_expert_gate,
            "attention_output_gate": self.has_output_gate,
            "layernorm_zero_centered_gamma": self.has_zero_centered_norms,
        }
        arguments |= {name: True for name, is_on in switches.items() if is_on}
        return arguments | (delta_nets(model) if "delta" in model.mixers else {})

    def rules(self, model: ModelConfig, experts: weight_rules.ExpertLayout) -> Iterator[WeightRule]:
        """Yield a rule for each Megatron tensor or slice of a tensor; an export applies the same rules backwards."""
        yield from weight_rules.outer(model)
        for layer in (*weight_rules.decoder_layers(model), *weight_rules.mtp_layers(model)):
            yield from self.layer_rules(model, layer, experts)
        yield from weight_rules.mtp(model)

    def duplicates(self, model: ModelConfig) -> Iterator[DuplicateTensor]:
        """Yield the tensors in Hugging Face checkpoints that repeat another tensor."""
        yield from weight_rules.duplicates(model)

    def layer_rules(
        self, model: ModelConfig, layer: weight_rules.LayerNames, experts: weight_rules.ExpertLayout
    ) -> Iterator[WeightRule]:
        """Yield the rules of one transformer layer."""
        yield from self.attention_rules(model, layer)
        yield from weight_rules.feed_forward(
            model, layer, experts, self.moe_names, has_shared_gate=self.has_shared_expert_gate
        )

    def attention_rules(self, model: ModelConfig, layer: weight_rules.LayerNames) -> Iterator[WeightRule]:
        """Yield the rules of one layer's attention and of the norm before it."""
        if self.is_latent:
            return weight_rules.latent(model, layer)
        return weight_rules.grouped_query(
            model,
            layer,
            has_bias=self.has_qkv_bias(model),
            has_norms=self.has_qk_norm(model),
            has_full_norms=self.has_full_qk_norm,
            has_gate=self.has_output_gate,
        )

    def has_qkv_bias(self, model: ModelConfig) -> bool:
        """Return whether queries, keys and values have biases: the setting, or the family's default if "auto"."""
        return (self.qkv_bias[0] if model.qkv_bias == "auto" else model.qkv_bias) == "on"

    def has_qk_norm(self, model: ModelConfig) -> bool:
        """Return whether queries and keys are normed: the setting, or the family's default if "auto"."""
        return (self.qk_norm[0] if model.qk_norm == "auto" else model.qk_norm) == "on"

    def own_group_score(self, model: ModelConfig) -> int | None:
        """Return how many experts rank a group if not Megatron's `top_k // top_groups`, else None."""
        best, groups, chosen = self.experts_in_group_score, model.moe.num_groups, model.moe.top_groups
        if best is None or groups is None or chosen is None or chosen == groups:
            return None
        return best if model.moe.top_k // chosen != best else None


def latent_attention(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's arguments for multi-head latent attention (arXiv 2405.04434)."""
    mla, rope = model.mla, model.rope
    is_yarn = rope.scaling == "yarn"
    return {
        "num_attention_heads": model.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "yarn" if is_yarn else "rope",
        "rotary_base": rope.theta,
        # Megatron scales the softmax by these for any rope_type: 1 has no effect.
        "rotary_scaling_factor": rope.factor if is_yarn else 1.0,
        "original_max_position_embeddings": rope.original_length,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale if is_yarn else 1.0,
        "mscale_all_dim": rope.mscale_all_dim if is_yarn else 1.0,
    }


def delta_nets(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's arguments for gated delta nets (arXiv 2412.06464)."""
    delta = model.delta
    return {
        # As a list, so that checkpoint keys have layer numbers. `experimental_attention_variant` stays unset: with it
        # Megatron's checks require Megatron's own layer, which needs the package fla.
        "linear_attention_freq": [int(mixer == "delta") for mixer in model.mixers],
        "linear_conv_kernel_dim": delta.conv_width,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def yarn(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's names and values for YaRN without latent attention (arXiv 2309.00071)."""
    rope = model.rope
    return {
        "yarn_rotary_scaling_factor": rope.factor,
        "yarn_original_max_position_embeddings": rope.original_length,
        "yarn_beta_fast": rope.beta_fast,
        "yarn_beta_slow": rope.beta_slow,
        "yarn_mscale": rope.mscale,
        "yarn_mscale_all_dim": rope.mscale_all_dim,
        "yarn_correction_range_round_to_int": rope.truncate,
    }


def routed_experts(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's arguments for the experts, and for the part of the router that all families share."""
    moe = model.moe
    layers = [int(is_moe) for is_moe in model.moe_layers]
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.top_groups,
        "moe_router_topk_scaling_factor": moe.routed_scaling if moe.routed_scaling != 1 else None,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_width or None,
        # With an int the checkpoint keys are the same as Megatron-LM's for a model of identical layers.
        "moe_layer_freq": 1 if all(model.moe_layers) else layers,
        "moe_router_load_balancing_type": moe.balance,
        "moe_aux_loss_coeff": 0.0 if moe.balance == "none" else moe.aux_loss_coeff,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_expert_capacity_factor": moe.capacity_factor,
        # In bf16 close experts would have equal scores, and the choice between them would be arbitrary.
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
    }
