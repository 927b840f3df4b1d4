"""The text models of Qwen3.5 and Qwen3.6: Qwen3-Next's layers with different projection names, dense or MoE."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import HfConfig, common, delta_nets, num_mtp_layers, require, require_keys
from mcore_rl.families.qwen3_next import FRACTION, Qwen3Next
from mcore_rl.families.weight_map import HfRows


class Qwen35Moe(Qwen3Next):
    """Qwen3.5-MoE: every layer has experts, and their gates sum to 1."""

    model_type = "qwen3_5_moe_text"
    hf_class = "Qwen3_5MoeForCausalLM"
    has_score_class = False
    settings = tuple(name for name in Qwen3Next.settings if name != "moe.first_dense_layers")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require(config, {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1})
        # Published configs have no dense layers, and therefore no width for them.
        width = config.get("intermediate_size") or config.get("moe_intermediate_size")
        return super().from_hf({**config, "intermediate_size": width})

    def violations(self, model: ModelConfig) -> Iterator[str]:
        """Yield a sentence for each setting that transformers' class does not have."""
        yield from super().violations(model)
        if not model.moe.normalize_top_k:
            yield f"model.moe.normalize_top_k=false: {self.model_type} always norms its gates. Set it to true."

    def projections(self, model: ModelConfig, prefix: str) -> Mapping[str, Sequence[HfRows]]:
        """Return the rows of each part of a delta net's projection; queries, keys and values are concatenated."""
        return apart(model, prefix)


class Qwen35(Qwen3Next):
    """Qwen3.5, dense."""

    model_type = "qwen3_5_text"
    hf_class = "Qwen3_5ForCausalLM"
    score_class = "Qwen3_5TextForSequenceClassification"
    router = "none"
    has_shared_expert_gate = False
    settings = ("delta.full_every", "rope.fraction", "mtp_layers")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require_keys(config, "num_key_value_heads", "head_dim")
        require(config, {"attn_output_gate": True, "mtp_use_dedicated_embeddings": False})
        return common(config, fraction=FRACTION) | {"delta": delta_nets(config), "mtp_layers": num_mtp_layers(config)}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return self._positions_and_layers(model)

    def projections(self, model: ModelConfig, prefix: str) -> Mapping[str, Sequence[HfRows]]:
        """Return the rows of each part of a delta net's projection; queries, keys and values are concatenated."""
        return apart(model, prefix)


def apart(model: ModelConfig, prefix: str) -> dict[str, list[HfRows]]:
    """Return the rows of each part of a delta net's projection if only queries, keys and values share a tensor."""
    delta = model.delta
    query, value, qkv = delta.query_width, delta.value_width, prefix + "in_proj_qkv.weight"
    return {
        "query": [HfRows(qkv, 0, query)],
        "key": [HfRows(qkv, query, 2 * query)],
        "value": [HfRows(qkv, 2 * query, 2 * query + value)],
        "z": [HfRows(prefix + "in_proj_z.weight", 0, value)],
        "beta": [HfRows(prefix + "in_proj_b.weight", 0, delta.value_heads)],
        "alpha": [HfRows(prefix + "in_proj_a.weight", 0, delta.value_heads)],
    }
