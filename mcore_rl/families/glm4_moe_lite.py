"""GLM-4.7-Flash: the latent attention of DeepSeek-V3 with the experts of GLM-4.5 (arXiv 2508.06471)."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.deepseek_v3 import DeepseekV3


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: its config.json says by two keys which layers are dense."""

    model_type = "glm4_moe_lite"
    hf_class = "Glm4MoeLiteForCausalLM"
    has_score_class = False

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
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
