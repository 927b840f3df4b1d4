"""DeepSeek-V2, V3 (also Kimi-K2, Moonlight) and V3.2, with latent attention, and the GLM models with their layers."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import GROUPED_EXPERTS, Family
from mcore_rl.families.rules import LayerNames, indexer
from mcore_rl.families.weight_map import WeightRule


class DeepseekV2(Family):
    """DeepSeek-V2: gates are the softmax's probabilities and do not sum to 1."""

    model_type = "deepseek_v2"
    hf_class = "DeepseekV2ForCausalLM"
    router = "softmax"
    is_latent = True
    settings = GROUPED_EXPERTS
    experts_in_group_score = 1

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require(
            config,
            {
                "scoring_func": "softmax",
                "norm_topk_prob": False,
                "moe_layer_freq": 1,
                "num_key_value_heads": hf.needed(config, "num_attention_heads"),
            },
        )
        moe = hf.grouped_experts(config)
        method = config.get("topk_method") or "greedy"
        if method == "greedy":
            # Published configs with this method set groups nevertheless.
            del moe["num_groups"], moe["top_groups"]
        elif method != "group_limited_greedy":
            raise hf.refusal(config, "topk_method", "has only 'greedy' and 'group_limited_greedy'")
        moe |= {
            "normalize_top_k": False,
            "balance": "seq_aux_loss" if config.get("seq_aux", True) else "aux_loss",
            "aux_loss_coeff": config.get("aux_loss_alpha", 1e-3),
        }
        return hf.common(config) | {"mla": hf.latents(config), "moe": moe}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return (
            hf.grouped_experts_to_hf(model)
            | hf.latents_to_hf(model)
            | {
                "norm_topk_prob": False,
                "scoring_func": "softmax",
                "topk_method": "group_limited_greedy" if model.moe.num_groups else "greedy",
                "aux_loss_alpha": model.moe.aux_loss_coeff,
                "seq_aux": model.moe.balance != "aux_loss",
            }
        )

    def violations(self, model: ModelConfig) -> Iterator[str]:
        """Yield a sentence if gates are normalized to sum to 1."""
        if model.is_moe and model.moe.normalize_top_k:
            yield (
                f"model.moe.normalize_top_k=true: the gates of {self.model_type} are the softmax's probabilities "
                "(times model.moe.routed_scaling). Set it to false."
            )


class DeepseekV3(Family):
    """DeepSeek-V3: a bias on the choice of experts balances their load; MTP layers predict more than one token."""

    model_type = "deepseek_v3"
    hf_class = "DeepseekV3ForCausalLM"
    router = "sigmoid"
    is_latent = True
    settings: tuple[str, ...] = (*GROUPED_EXPERTS, "moe.expert_bias", "mtp_layers")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require_keys(config, "num_key_value_heads")
        hf.require(
            config,
            {
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "norm_topk_prob": True,
                "moe_layer_freq": 1,
                "rope_interleave": True,
                "num_key_value_heads": hf.needed(config, "num_attention_heads"),
            },
        )
        return hf.common(config) | {
            "mla": hf.latents(config),
            "moe": hf.grouped_experts(config) | {"balance": "none", "expert_bias": True},
            "mtp_layers": hf.num_mtp_layers(config),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return (
            hf.grouped_experts_to_hf(model)
            | hf.latents_to_hf(model)
            | {
                "norm_topk_prob": True,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "num_nextn_predict_layers": model.mtp_layers,
            }
        )


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: its config.json says by two keys which layers are dense."""

    model_type = "glm4_moe_lite"
    hf_class = "Glm4MoeLiteForCausalLM"
    has_score_class = False

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        return super().from_hf({**config, "first_k_dense_replace": first_dense_layers(config)})

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json; dense layers are set by the published key and transformers 5's."""
        keys = super().to_hf(model)
        del keys["scoring_func"]
        return keys | {"mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in model.moe_layers]}


def first_dense_layers(config: HfConfig) -> int:
    """Return the number of leading layers without experts. Raises ConfigError unless both keys for it agree."""
    hf.check_types(config, hf.KINDS)
    stated = {"first_k_dense_replace": config.get("first_k_dense_replace")}
    types = config.get("mlp_layer_types")
    if types is not None:
        first = types.index("sparse") if "sparse" in types else len(types)
        if types != ["dense"] * first + ["sparse"] * (hf.needed(config, "num_hidden_layers") - first):
            raise hf.refusal(config, "mlp_layer_types", "has dense layers only before the first layer with experts")
        stated["number of dense layers in mlp_layer_types"] = first
    found = hf.alias(stated, *stated)
    return 1 if found is None else int(found)


class DeepseekV32(DeepseekV3):
    """Nothing trains the indexers: a choice has no gradient."""

    model_type = "deepseek_v32"
    hf_class = "DeepseekV32ForCausalLM"
    has_score_class = False
    settings = (*DeepseekV3.settings, "indexer.top_k")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.needed(config, "q_lora_rank")
        hf.require_keys(config, "first_k_dense_replace")
        arguments = super().from_hf({**config, "first_k_dense_replace": first_dense_layers(config)})
        return arguments | {
            "indexer": {
                "top_k": hf.needed(config, "index_topk"),
                "heads": hf.needed(config, "index_n_heads"),
                "width": hf.needed(config, "index_head_dim"),
                "shared_layers": self.shared_layers(config),
            }
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        shape = model.indexer
        return super().to_hf(model) | {
            "index_topk": shape.top_k,
            "index_n_heads": shape.heads,
            "index_head_dim": shape.width,
        }

    def violations(self, model: ModelConfig) -> Iterator[str]:
        """Yield a sentence for each setting of indexers that the family has not."""
        shape, mla = model.indexer, model.mla
        if shape.top_k is None:
            yield (
                f'model.indexer.top_k="none" with model.family="{model.family}": indexers choose so many keys for each '
                "query. Set it to 2048, as in the published models."
            )
        if mla.q_lora_rank is None:
            yield (
                f'model.mla.q_lora_rank="none" with model.family="{model.family}": its indexers make their queries of '
                "that latent. Set it to the latent's width."
            )
        if shape.width < mla.qk_rope_head_dim:
            yield (
                f"model.indexer.width={shape.width} is less than model.mla.qk_rope_head_dim={mla.qk_rope_head_dim}: so "
                "many numbers of an index head are turned. Make it wider."
            )
        if model.attention_dropout:
            yield (
                f'model.attention_dropout={model.attention_dropout} with model.family="{model.family}": its attention '
                "over chosen keys has no dropout here. Set it to 0."
            )
        yield from self._shared_layers(model)

    def architecture(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's config that make the family's layers."""
        # As a list it makes the keys in checkpoints have layer numbers, which layers that differ need.
        return super().architecture(model) | {"moe_layer_freq": [int(is_moe) for is_moe in model.moe_layers]}

    def attention_rules(self, model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
        """Yield the rules of one layer's attention, of its indexer if it has one, and of the norm before it."""
        yield from super().attention_rules(model, layer)
        if layer.mixer == "indexed":
            yield from indexer(model, layer)

    def shared_layers(self, config: HfConfig) -> tuple[int, ...]:
        """Return the layers of a config.json without an indexer of their own: there are none in this family."""
        return ()

    def _shared_layers(self, model: ModelConfig) -> Iterator[str]:
        if model.indexer.shared_layers:
            yield (
                f"model.indexer.shared_layers={list(model.indexer.shared_layers)}: every layer of {self.model_type} "
                'has an indexer. Leave it out, or take model.family="glm_moe_dsa".'
            )


FULL, SHARED = "full", "shared"
"""Names in config.json of layers with an indexer, and of those that take the last choice before them."""
LETTERS = {"F": FULL, "S": SHARED}
"""The same in `index_topk_pattern`."""

PATTERN = hf.Kind("a text or a list", lambda value: isinstance(value, str | list))


class GlmMoeDsa(DeepseekV32):
    """An indexer turns neighbouring numbers as pairs, where DeepSeek-V3.2's turns halves."""

    model_type = "glm_moe_dsa"
    hf_class = "GlmMoeDsaForCausalLM"
    has_interleaved_indexer = True

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require(config, {"indexer_rope_interleave": True})
        return super().from_hf(config)

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        types = [SHARED if mixer == "shared" else FULL for mixer in model.mixers]
        return super().to_hf(model) | {"indexer_types": types, "indexer_rope_interleave": True}

    def shared_layers(self, config: HfConfig) -> tuple[int, ...]:
        """Return the layers without an indexer: a list's, else a pattern's, else by two numbers."""
        hf.check_types(config, hf.KINDS | {"index_topk_pattern": PATTERN})
        count = hf.needed(config, "num_hidden_layers")
        name = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
        kinds = config.get(name)
        if kinds is None:
            every, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
            first = 1 if offset is None else offset - 1
            return tuple(layer for layer in range(count) if max(layer - first, 0) % max(every, 1))
        kinds = [LETTERS.get(str(kind), kind) for kind in kinds]
        if len(kinds) != count or any(kind not in (FULL, SHARED) for kind in kinds):
            raise hf.refusal(config, name, f"has {count} layers, of which each is {FULL} or {SHARED}")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == SHARED)

    def _shared_layers(self, model: ModelConfig) -> Iterator[str]:
        shared = model.indexer.shared_layers
        if 0 in shared:
            yield (
                f"model.indexer.shared_layers={list(shared)}: there is no choice before the first layer. Leave 0 out."
            )
        if beyond := [layer for layer in shared if layer >= model.num_layers]:
            yield (
                f"model.indexer.shared_layers={list(shared)} with model.num_layers={model.num_layers}: there are no "
                f"layers {beyond}. Leave them out."
            )
