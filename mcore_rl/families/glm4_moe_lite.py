"""GLM-4.7-Flash: the latent attention of DeepSeek-V3 with the experts of GLM-4.5 (arXiv 2508.06471)."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import GROUPED_EXPERTS, Family
from mcore_rl.families.hf_config import (
    KINDS,
    HfConfig,
    alias,
    check_types,
    common,
    grouped_experts,
    grouped_experts_to_hf,
    latents,
    latents_to_hf,
    needed,
    num_mtp_layers,
    refusal,
    require,
    require_keys,
)


class Glm4MoeLite(Family):
    """GLM-4.7-Flash: a bias on the choice of experts balances their load; MTP layers predict more than one token."""

    model_type = "glm4_moe_lite"
    hf_class = "Glm4MoeLiteForCausalLM"
    has_score_class = False
    router = "sigmoid"
    is_latent = True
    settings = (*GROUPED_EXPERTS, "moe.expert_bias", "mtp_layers")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require_keys(config, "num_key_value_heads")
        require(
            config,
            {
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "norm_topk_prob": True,
                "rope_interleave": True,
                "num_key_value_heads": needed(config, "num_attention_heads"),
            },
        )
        dense = {"first_k_dense_replace": first_dense_layers(config)}
        return common(config) | {
            "mla": latents(config),
            "moe": grouped_experts({**config, **dense}) | {"balance": "none", "expert_bias": True},
            "mtp_layers": num_mtp_layers(config),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json; dense layers are set by the published key and transformers 5's."""
        return (
            grouped_experts_to_hf(model)
            | latents_to_hf(model)
            | {
                "norm_topk_prob": True,
                "topk_method": "noaux_tc",
                "mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in model.moe_layers],
                "num_nextn_predict_layers": model.mtp_layers,
            }
        )


def first_dense_layers(config: HfConfig) -> int:
    """Return the number of leading layers without experts. Raises ConfigError unless both keys for it agree."""
    check_types(config, KINDS)
    stated = {"first_k_dense_replace": config.get("first_k_dense_replace")}
    types = config.get("mlp_layer_types")
    if types is not None:
        first = types.index("sparse") if "sparse" in types else len(types)
        if types != ["dense"] * first + ["sparse"] * (needed(config, "num_hidden_layers") - first):
            raise refusal(config, "mlp_layer_types", "has dense layers only before the first layer with experts")
        stated["number of dense layers in mlp_layer_types"] = first
    found = alias(stated, *stated)
    return 1 if found is None else int(found)
