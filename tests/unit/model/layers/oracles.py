"""The layers' formulas, written out in float64."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def small_config(**changes: Any) -> TransformerConfig:
    """A Megatron config of a small SwiGLU model."""
    settings: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
        "ffn_hidden_size": 48, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
        "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0, "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm", "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "bias_activation_fusion": False, "masked_softmax_fusion": False,
        "init_method_std": 0.3,
    }  # fmt: skip
    config = TransformerConfig(**settings | changes)
    config.layers, config.rounds_products = "torch", False
    return config


def attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, sinks_N: Tensor | None = None
) -> Tensor:
    """`[s, B, N, Dv]`: softmax(scale * q k) v over the keys that `visible [s, S]` shows, and over a head's sink."""
    shared = query.shape[2] // key.shape[2]
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(shared, 2), value.repeat_interleave(shared, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks_N is not None:
        column = sinks_N.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("bnst,tbnd->sbnd", weights, value)


def causal(num_queries: int, num_keys: int, window: int | None = None) -> Tensor:
    """`[s, S]`: the queries are the last of the keys' positions."""
    query_places = torch.arange(num_keys - num_queries, num_keys)[:, None]
    behind = query_places - torch.arange(num_keys)
    return (behind >= 0) & (behind <= (num_keys if window is None else window))


def experts(rows: Tensor, gates: Tensor, chosen: list[int], fc1: Tensor, fc2: Tensor) -> Tensor:
    """`[N, D]`: gate * fc2(silu(gate half) * up half) of each row by its chosen expert, row after row."""
    outputs = []
    for row, gate, expert in zip(rows.double(), gates.double(), chosen, strict=True):
        gate_half, up_half = (fc1[expert].double() @ row).chunk(2)
        outputs.append(gate * (fc2[expert].double() @ (torch.nn.functional.silu(gate_half) * up_half)))
    return torch.stack(outputs) if outputs else rows.double()


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a loss that weights every element of `output` differently, in float64."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for input in inputs:
        input.grad = None
    (output.double() * weights).sum().backward()
    grads = [input.grad for input in inputs]
    assert all(grad is not None for grad in grads)
    return [grad.double() for grad in grads if grad is not None]


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Every element, to `relative` of the largest."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max()
    assert error <= relative * expected.double().abs().max(), f"{error} of {expected.abs().max()}"
