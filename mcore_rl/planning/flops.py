"""FLOPs that a model needs for a token.

Only matrix products count, 2 FLOPs for a multiply-add, as in appendix B of PaLM (arXiv 2204.02311): projections,
attention scores, the states of gated delta nets, MLPs, router, output layer. The embedding look-up, norms, softmax,
rotary positions, the optimizer and recomputation do not: these are *model* FLOPs, which the mathematics needs. The
backward pass is twice the forward pass, since each product has a gradient for its input and a gradient for its weight.
With low-rank adapters the weights have no gradient, and the backward pass of their products is as long as the forward
pass; the products of adapters take three as before.

Conventions where the field differs:
- causal attention counts half of the full S x S scores (PaLM and FlopCounterMode count them in full);
- a layer with a sliding window counts the part of them inside the window;
- attention over chosen keys counts these, and the products of the indexer, which have no backward pass; the layers of
  this package compute the scores of all keys;
- a gated delta net counts its recurrence, token by token, and its convolution; chunks compute more;
- a token passes `top_k` routed experts, even when a capacity drops some;
- the output layer has `vocab_size` rows, without padding, or a single row with a scalar head;
- an MTP layer is its projection [2D, D], one transformer layer like the last, and the output layer again.
"""

from collections.abc import Callable

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.families import family_of
from mcore_rl.planning.weights import active_adapters

FORWARD_AND_BACKWARD = 3


def train_flops_per_token(config: ModelConfig, seq_length: float, lora: LoraConfig | None = None) -> float:
    """Return the model FLOPs of forward and backward pass for one token; with `lora` only its adapters are trained.

    For packed sequences `seq_length` is the mean over tokens: sum of squared lengths / sum of lengths.
    """
    return train_flops_by_length(config, lora)(seq_length)


def forward_flops_per_token(config: ModelConfig, seq_length: float) -> dict[str, float]:
    """Return the FLOPs of the forward pass for one token by part of the model; their sum is the whole model's."""
    return _forward_flops_by_length(config)(seq_length)


def train_flops_by_length(config: ModelConfig, lora: LoraConfig | None = None) -> Callable[[float], float]:
    """Return `train_flops_per_token` of this model as a function of the length, which changes from step to step."""
    forward = _forward_flops_by_length(config)
    is_adapted = lora is not None and lora.is_on
    adapters = 0.0 if lora is None else FORWARD_AND_BACKWARD * 2.0 * active_adapters(lora, config)

    def of_length(seq_length: float) -> float:
        parts = forward(seq_length)
        if not is_adapted:
            return FORWARD_AND_BACKWARD * sum(parts.values()) - (FORWARD_AND_BACKWARD - 1) * parts["indexer"]
        # Both factors of attention's scores, and of a state's products, are activations, each with a gradient.
        without_weights = parts["attention_scores"] + parts["delta_rule"]
        return (FORWARD_AND_BACKWARD - 1) * sum(parts.values()) + without_weights + adapters

    return of_length


def _forward_flops_by_length(config: ModelConfig) -> Callable[[float], dict[str, float]]:
    hidden = config.hidden_size
    kinds = config.layer_kinds + (config.mtp_kind,) * config.mtp_layers
    num_layers, num_moe = len(kinds), sum(kind.is_moe for kind in kinds)
    attending = [layer for layer, kind in enumerate(kinds) if kind.mixer != "delta"]
    # Layers with an even index may have a window, layers with an odd index have none.
    by_parity = [sum(layer % 2 == odd for layer in attending) for odd in (0, 1)]
    num_delta, delta = num_layers - len(attending), config.delta
    convolved = 2 * delta.query_width + delta.value_width
    delta_projections = hidden * (convolved + 2 * delta.value_width + 2 * delta.value_heads)
    delta_projections += delta.conv_width * convolved
    family = family_of(config)
    projections, scores = (_latent_attention if family.is_latent else _attention)(config)
    shared_gate = hidden if family.has_shared_expert_gate else 0
    macs = {
        "attention_projections": len(attending) * projections + num_delta * delta_projections,
        "attention_scores": 0.0,
        "indexer": 0.0,
        "delta_rule": num_delta * 3 * delta.value_heads * delta.key_dim * delta.value_dim,
        "dense_mlp": (num_layers - num_moe) * 3 * hidden * config.ffn_hidden_size,
        "router": num_moe * hidden * config.moe.num_experts,
        "experts": num_moe * config.moe.top_k * 3 * hidden * config.moe.ffn_hidden_size,
        "shared_experts": num_moe * (3 * hidden * config.moe.shared_width + shared_gate),
        "mtp_projections": config.mtp_layers * 2 * hidden * hidden,
        "output": (1 + config.mtp_layers) * hidden * (1 if config.head == "score" else config.vocab_size),
    }
    num_indexers, indexer = sum(kind.mixer == "indexed" for kind in kinds), config.indexer
    index_projections = (config.mla.q_lora_rank or hidden) * indexer.heads * indexer.width
    index_projections += hidden * (indexer.width + indexer.heads)

    def of_length(seq_length: float) -> dict[str, float]:
        # Sequences of up to topk tokens attend to all keys, and their keys have no scores.
        indexed = 0.0
        if indexer.top_k is not None and seq_length > indexer.top_k:
            indexed = num_indexers * (index_projections + seq_length / 2 * (indexer.heads * indexer.width))
        seen = sum(by_parity[odd] * _seen_positions(config, odd, seq_length) for odd in (0, 1))
        return {
            part: 2.0 * count
            for part, count in (macs | {"attention_scores": seen * scores, "indexer": indexed}).items()
        }

    return of_length


def _seen_positions(config: ModelConfig, layer: int, seq_length: float) -> float:
    window = config.sliding_window if layer % 2 == 0 else None
    window = window or config.indexer.top_k
    if not window or window >= seq_length:
        return seq_length / 2
    # The first `window` tokens see window / 2 positions on average, all later tokens the whole window, or so many keys.
    return window - window * window / (2 * seq_length)


def _attention(config: ModelConfig) -> tuple[int, int]:
    query = config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    gate = query if family_of(config).has_output_gate else 0
    return config.hidden_size * (2 * query + key_value + gate), 2 * query


def _latent_attention(config: ModelConfig) -> tuple[int, int]:
    # Training form, which expands keys and values.
    mla, hidden = config.mla, config.hidden_size
    query = config.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = config.num_heads * mla.v_head_dim
    expanded = config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    query_path = (hidden + query) * mla.q_lora_rank if mla.q_lora_rank else hidden * query
    key_value_path = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank * expanded
    return query_path + key_value_path + value * hidden, query + value
