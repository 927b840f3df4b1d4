"""GLM-4.5 and later (arXiv 2508.06471): grouped-query attention that rotates half a head, experts as in DeepSeek-V3."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import GROUPED_EXPERTS, Family


class Glm4Moe(Family):
    """GLM-4.5: attention biases and norms differ between the published sizes."""

    model_type = "glm4_moe"
    hf_class = "Glm4MoeForCausalLM"
    has_score_class = False
    router = "sigmoid"
    qkv_bias = ("on", "off")
    qk_norm = ("off", "on")
    settings = (*GROUPED_EXPERTS, "moe.expert_bias", "mtp_layers", "rope.fraction")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        hf.require_keys(config, "num_key_value_heads")
        hf.require(config, {"norm_topk_prob": True})
        # In this family `attention_bias` means only queries, keys and values; `common` would refuse it.
        arguments = hf.common({**config, "attention_bias": False}, fraction=0.5)
        return arguments | {
            "qkv_bias": "on" if config.get("attention_bias") else "off",
            "qk_norm": "on" if config.get("use_qk_norm") else "off",
            "moe": hf.grouped_experts(config) | {"balance": "none", "expert_bias": True},
            "mtp_layers": hf.num_mtp_layers(config),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return hf.grouped_experts_to_hf(model) | {
            "attention_bias": self.has_qkv_bias(model),
            "use_qk_norm": self.has_qk_norm(model),
            "partial_rotary_factor": model.rope.fraction,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": model.mtp_layers,
        }
