"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with an indexer in each layer that chooses the keys of a query."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import HfConfig, needed, require_keys
from mcore_rl.families.deepseek_v3 import DeepseekV3
from mcore_rl.families.glm4_moe_lite import first_dense_layers
from mcore_rl.families.rules import LayerNames, indexer
from mcore_rl.families.weight_map import WeightRule


class DeepseekV32(DeepseekV3):
    """Nothing trains the indexers: a choice has no gradient."""

    model_type = "deepseek_v32"
    hf_class = "DeepseekV32ForCausalLM"
    has_score_class = False
    settings = (*DeepseekV3.settings, "indexer.top_k")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        needed(config, "q_lora_rank")
        require_keys(config, "first_k_dense_replace")
        arguments = super().from_hf({**config, "first_k_dense_replace": first_dense_layers(config)})
        return arguments | {
            "indexer": {
                "top_k": needed(config, "index_topk"),
                "heads": needed(config, "index_n_heads"),
                "width": needed(config, "index_head_dim"),
                "shared_layers": self.shared_layers(config),
            }
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
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
