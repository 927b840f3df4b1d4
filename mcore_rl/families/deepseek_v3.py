"""DeepSeek-V3 (arXiv 2412.19437), also Kimi-K2 and Moonlight: latent attention, sigmoid routing, shared experts."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import GROUPED_EXPERTS, Family


class DeepseekV3(Family):
    """DeepSeek-V3: a bias on the choice of experts balances their load; MTP layers predict more than one token."""

    model_type = "deepseek_v3"
    hf_class = "DeepseekV3ForCausalLM"
    router = "sigmoid"
    is_latent = True
    settings: tuple[str, ...] = (*GROUPED_EXPERTS, "moe.expert_bias", "mtp_layers")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
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
        """Return the family's keys of config.json."""
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
