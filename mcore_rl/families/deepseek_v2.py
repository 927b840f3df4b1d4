"""DeepSeek-V2 (arXiv 2405.04434): latent attention, raw softmax gates, groups ranked by their best expert."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import GROUPED_EXPERTS, Family


class DeepseekV2(Family):
    """DeepSeek-V2: gates are the softmax's probabilities and do not sum to 1."""

    model_type = "deepseek_v2"
    hf_class = "DeepseekV2ForCausalLM"
    router = "softmax"
    is_latent = True
    settings = GROUPED_EXPERTS
    experts_in_group_score = 1

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
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
        """Return the family's keys of config.json."""
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
