"""Experts on GPUs, or with any activation: two grouped matrix products over rows sorted by expert."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad


class LowRank(NamedTuple):
    """The low-rank adapter of a linear layer of all experts, which adds scale * B A to each weight."""

    a_ERI: Tensor
    """A of each expert: a single block of rows, or a block for each projection, concatenated."""
    b_EOr: Tensor
    """B of each expert; r is the rank of a single block."""
    scale: float


class Linear(NamedTuple):
    """A linear layer of all experts."""

    weight_EOI: Tensor
    bias_EO: Tensor | None
    adapter: LowRank | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that may get a gradient."""
        yield self.weight_EOI
        if self.bias_EO is not None:
            yield self.bias_EO
        if self.adapter is not None:
            yield from (self.adapter.a_ERI, self.adapter.b_EOr)


GROUPED_ALIGNMENT_BYTES = 16
"""grouped_mm needs row sizes that are multiples of this, in bytes."""
# Older versions of torch lack grouped_mm: a loop over the experts then computes the same.
HAS_GROUPED_MM = hasattr(torch.nn.functional, "grouped_mm")


def grouped_experts(
    rows_ND: Tensor,
    gates_N: Tensor,
    fc1: Linear,
    fc2: Linear,
    counts_E: Tensor,
    config: TransformerConfig,
) -> Tensor:
    """Return gate * fc2(activation(fc1(x))) of each row, `[N, D]`.

    Args:
        rows_ND: Inputs, sorted by expert.
        gates_N: Router probability of each row.
        fc1: First linear layer of all experts; the gate's rows are above the up-projection's.
        fc2: Second linear layer.
        counts_E: Number of rows of each expert.
        config: Activation and recomputation.
    """
    if not len(rows_ND):
        # Gates and weights need a gradient even without any row: ranks exchange the gates' gradients in the backward
        # pass and would wait for this rank, and overlapped reduction waits for every parameter.
        used = (gates_N, *fc1.tensors(), *fc2.tensors())
        return rows_ND + 0.0 * sum(tensor.sum() for tensor in used)
    activate = partial(_activate, config=config)
    hidden_NF, gates_N1 = _adapted(rows_ND, fc1, counts_E), gates_N[:, None]
    if fc1.bias_EO is not None:
        hidden_NF = hidden_NF + _of_each_row(fc1.bias_EO, counts_E, len(rows_ND))
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        checkpoint = CheckpointWithoutOutput(fp8=None)
        active_NF = checkpoint.checkpoint(activate, hidden_NF, gates_N1)
        output_ND = _adapted(active_NF, fc2, counts_E)
        # The activation is freed after fc2 has read it, and recomputed before fc2's backward pass.
        checkpoint.discard_output_and_register_recompute(output_ND)
    else:
        output_ND = _adapted(activate(hidden_NF, gates_N1), fc2, counts_E)
    if fc2.bias_EO is not None:
        # The activations already include the gate, the biases do not.
        biases_ND = _of_each_row(fc2.bias_EO, counts_E, len(rows_ND)) * gates_N1
        output_ND = output_ND + biases_ND.to(output_ND.dtype)
    return output_ND


def _adapted(rows_NI: Tensor, layer: Linear, counts_E: Tensor) -> Tensor:
    """Return each row times the transposed weight of its expert, plus the adapter's part, if any."""
    output_NO = _products(rows_NI, layer.weight_EOI, counts_E)
    if layer.adapter is None:
        return output_NO
    a_ERI, b_EOr, scale = layer.adapter
    if missing := -b_EOr.shape[-1] % (GROUPED_ALIGNMENT_BYTES // b_EOr.element_size()):
        a_ERI = torch.cat([pad(block, (0, 0, 0, missing)) for block in a_ERI.split(b_EOr.shape[-1], 1)], 1)
        b_EOr = pad(b_EOr, (0, missing))
    lows = _products(rows_NI, a_ERI, counts_E).split(b_EOr.shape[-1], 1)
    parts = b_EOr.chunk(len(lows), 1)
    branches = [_products(low, part, counts_E) for low, part in zip(lows, parts, strict=True)]
    return torch.add(output_NO, torch.cat(branches, 1), alpha=scale)


def _of_each_row(bias_EO: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
    """Return the bias of each row's expert, `[N, O]`."""
    return bias_EO.repeat_interleave(counts_E.to(bias_EO.device), 0, output_size=num_rows)


def _products(rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Return each row times the transposed weight of its expert."""
    if HAS_GROUPED_MM:
        ends = counts_E.to(rows_NI.device).cumsum(0).to(torch.int32)
        product_NO = torch.nn.functional.grouped_mm(rows_NI, weight_EOI.transpose(1, 2), offs=ends)
        dense: Tensor = _DenseGradient.apply(product_NO)  # type: ignore[no-untyped-call]
        return dense
    parts = zip(rows_NI.split(counts_E.tolist()), weight_EOI.unbind(0), strict=True)
    return torch.cat([rows @ weight.t() for rows, weight in parts])


def _activate(hidden_NF: Tensor, gates_N1: Tensor, config: TransformerConfig) -> Tensor:
    gate, up = hidden_NF.chunk(2, -1)
    if (limit := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    active_NF: Tensor = config.activation_func(gate) * (up + config.glu_linear_offset)
    return (active_NF * gates_N1).to(hidden_NF.dtype)


class _DenseGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient, which the backward pass of grouped_mm requires."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
