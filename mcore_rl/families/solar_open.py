"""Solar Open: grouped-query attention, and experts as in GLM-4.5 in every layer."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import GROUPED_EXPERTS, Family


class SolarOpen(Family):
    """Solar Open: a bias on the choice of experts balances their load; no layer is dense."""

    model_type = "solar_open"
    hf_class = "SolarOpenForCausalLM"
    has_score_class = False
    router = "sigmoid"
    qkv_bias = ("off", "on")
    settings = (*(name for name in GROUPED_EXPERTS if name != "moe.first_dense_layers"), "moe.expert_bias")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        hf.require_keys(config, "num_key_value_heads", "head_dim")
        hf.require(
            config,
            {
                "norm_topk_prob": True,
                "use_qk_norm": False,
                "first_k_dense_replace": 0,
                "num_nextn_predict_layers": 0,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
            },
        )
        # In this family `attention_bias` means only queries, keys and values; the width of dense layers is unused.
        width = hf.needed(config, "moe_intermediate_size")
        arguments = hf.common({**config, "attention_bias": False, "intermediate_size": width}, theta=1e6)
        # Absent groups are none, as for transformers: published configs leave them out.
        moe = hf.grouped_experts({"n_group": 1, "topk_group": 1, **config, "first_k_dense_replace": 0})
        return arguments | {
            "qkv_bias": "on" if config.get("attention_bias") else "off",
            "moe": moe | {"balance": "none", "expert_bias": True},
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return hf.grouped_experts_to_hf(model) | {
            "attention_bias": self.has_qkv_bias(model),
            "norm_topk_prob": True,
            "use_qk_norm": False,
        }
