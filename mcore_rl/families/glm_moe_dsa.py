"""GLM-5 to GLM-5.2: DeepSeek-V3.2's attention; layers may share the choice of keys (arXiv 2603.12201)."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import KINDS, HfConfig, Kind, check_types, needed, refusal, require
from mcore_rl.families.deepseek_v32 import DeepseekV32

FULL, SHARED = "full", "shared"
"""Names in config.json of layers with an indexer, and of those that take the last choice before them."""
LETTERS = {"F": FULL, "S": SHARED}
"""The same in `index_topk_pattern`."""

PATTERN = Kind("a text or a list", lambda value: isinstance(value, str | list))


class GlmMoeDsa(DeepseekV32):
    """An indexer turns neighbouring numbers as pairs, where DeepSeek-V3.2's turns halves."""

    model_type = "glm_moe_dsa"
    hf_class = "GlmMoeDsaForCausalLM"
    has_interleaved_indexer = True

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require(config, {"indexer_rope_interleave": True})
        return super().from_hf(config)

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        types = [SHARED if mixer == "shared" else FULL for mixer in model.mixers]
        return super().to_hf(model) | {"indexer_types": types, "indexer_rope_interleave": True}

    def shared_layers(self, config: HfConfig) -> tuple[int, ...]:
        """Return the layers without an indexer: a list's, else a pattern's, else by two numbers."""
        check_types(config, KINDS | {"index_topk_pattern": PATTERN})
        count = needed(config, "num_hidden_layers")
        name = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
        kinds = config.get(name)
        if kinds is None:
            every, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
            first = 1 if offset is None else offset - 1
            return tuple(layer for layer in range(count) if max(layer - first, 0) % max(every, 1))
        kinds = [LETTERS.get(str(kind), kind) for kind in kinds]
        if len(kinds) != count or any(kind not in (FULL, SHARED) for kind in kinds):
            raise refusal(config, name, f"has {count} layers, of which each is {FULL} or {SHARED}")
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
