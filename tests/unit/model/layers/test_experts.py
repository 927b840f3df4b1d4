from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.layers.cpu.experts import CompiledExperts
from mcore_rl.model.layers.experts import GroupedExperts, Linear, LowRank, grouped_experts
from tests.unit.model.layers import oracles
from tests.unit.model.layers.oracles import assert_close, gradients, small_config

Layer = Callable[..., GroupedExperts]
COUNTS = [[3, 0, 5, 1], [700, 40, 16, 0], [0, 0, 0, 33], [15, 16, 17, 512]]


@pytest.fixture(params=[GroupedExperts, CompiledExperts])
def grouped(request: pytest.FixtureRequest) -> Layer:
    """Makes experts of torch's functions, and compiled experts, which leave to torch what they do not compute."""
    return lambda mesh, **changes: request.param(4, small_config(**changes), pg_collection=mesh.groups)


def sorted_rows(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, counts, gates, as a dispatcher gives them."""
    rows = torch.randn(sum(counts), 32, requires_grad=True)
    return rows, torch.tensor(counts), torch.rand(sum(counts), requires_grad=True)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_output_and_gradients_are_those_of_the_closed_form(one_rank: Mesh, grouped: Layer, counts: list[int]) -> None:
    layer, (rows, tokens, gates) = grouped(one_rank), sorted_rows(counts)
    fc1, fc2 = layer.linear_fc1.weight, layer.linear_fc2.weight
    chosen = [expert for expert, count in enumerate(counts) for _ in range(count)]
    expected = oracles.experts(rows, gates, chosen, fc1, fc2)
    actual, bias = layer(rows, tokens, gates)
    assert bias is None
    assert_close(actual, expected, 1e-6)
    wanted = [rows, gates, fc1, fc2]
    for ours, theirs in zip(gradients(actual, wanted), gradients(expected, wanted), strict=True):
        assert_close(ours, theirs, 2e-6)


def test_biases_are_those_of_megatrons_sequential_experts(one_rank: Mesh, grouped: Layer) -> None:
    biased = {"add_bias_linear": True}
    layer, (rows, tokens, gates) = grouped(one_rank, **biased), sorted_rows([3, 0, 5, 1])
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    megatrons = SequentialMLP(4, small_config(**biased), submodules, one_rank.groups)
    ours = dict(layer.named_parameters())
    assert ours.keys() == {f"linear_fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    with torch.no_grad():
        for index, expert in enumerate(megatrons.local_experts):
            for name, param in expert.named_parameters():
                ours[name][index].copy_(param.normal_())
        assert_close(layer(rows, tokens, gates)[0], megatrons(rows, tokens, gates)[0], 1e-6)


def test_gradients_of_biases_are_those_of_the_closed_form(one_rank: Mesh, grouped: Layer) -> None:
    layer, (rows, tokens, gates) = grouped(one_rank, add_bias_linear=True), sorted_rows([3, 0, 5, 1])
    wanted = [rows, gates, *layer.parameters()]
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_()
    fc1, fc1_bias, fc2, fc2_bias = (param.double() for param in wanted[2:])
    parts = []
    for e, part in enumerate(rows.double().split(tokens.tolist())):
        gate, up = (part @ fc1[e].t() + fc1_bias[e]).chunk(2, -1)
        parts.append((nn.functional.silu(gate) * up) @ fc2[e].t() + fc2_bias[e])
    expected = torch.cat(parts) * gates.double()[:, None]
    actual = layer(rows, tokens, gates)[0]
    assert_close(actual, expected, 1e-6)
    for ours, theirs in zip(gradients(actual, wanted), gradients(expected, wanted), strict=True):
        assert_close(ours, theirs, 2e-6)


def test_without_a_row_every_weight_and_the_gates_still_get_a_gradient(one_rank: Mesh, grouped: Layer) -> None:
    """Overlapped reduction of gradients waits for every parameter, and other ranks for the gradient of the gates."""
    for changes in ({}, {"activation_func": nn.functional.gelu}, {"add_bias_linear": True}):
        layer, (rows, tokens, gates) = grouped(one_rank, **changes), sorted_rows([0, 0, 0, 0])
        gates.requires_grad_()
        layer(rows, tokens, gates)[0].sum().backward()
        assert gates.grad is not None
        for weight in layer.parameters():
            assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("activation", [nn.functional.silu, nn.functional.gelu])
def test_a_gradient_without_strides_is_taken(
    one_rank: Mesh, grouped: Layer, activation: Callable[[Tensor], Tensor]
) -> None:
    """The gradient of a sum is one number, expanded; torch's grouped product refuses such a one."""
    layer, (rows, tokens, gates) = grouped(one_rank, activation_func=activation), sorted_rows([3, 2, 0, 4])
    layer(rows, tokens, gates)[0].sum().backward()
    assert rows.grad is not None and rows.grad.any()


@pytest.mark.parametrize(
    ("changes", "activate"),
    [
        ({"activation_func": nn.functional.gelu}, lambda g, u: nn.functional.gelu(g) * u),
        (
            {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
            lambda g, u: nn.functional.silu(g.clamp(max=0.5)) * (u.clamp(-0.5, 0.5) + 1.0),
        ),
    ],
    ids=["gelu", "clamped"],
)
@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}])
def test_other_activations_are_computed_too(
    one_rank: Mesh, grouped: Layer, changes: dict[str, Any], activate: Callable[..., Tensor], recompute: dict[str, Any]
) -> None:
    layer, (rows, tokens, gates) = grouped(one_rank, **changes, **recompute), sorted_rows([4, 0, 2, 1])
    fc1, fc2 = layer.linear_fc1.weight, layer.linear_fc2.weight
    expected = torch.cat(
        [
            activate(*(part @ fc1[expert].double().t()).chunk(2, -1)) @ fc2[expert].double().t()
            for expert, part in enumerate(rows.double().split(tokens.tolist()))
        ]
    )
    expected = expected * gates.double()[:, None]
    actual, _ = layer(rows, tokens, gates)
    assert_close(actual, expected, 1e-6)
    wanted = [rows, gates, fc1, fc2]
    for ours, theirs in zip(gradients(actual, wanted), gradients(expected, wanted), strict=True):
        assert_close(ours, theirs, 2e-6)


def test_bf16_differs_by_rounding_only(one_rank: Mesh) -> None:
    config = small_config(params_dtype=torch.bfloat16, bf16=True)
    layer = GroupedExperts(4, config, pg_collection=one_rank.groups)
    rows, tokens, gates = sorted_rows([70, 9, 0, 33])
    chosen = [0] * 70 + [1] * 9 + [3] * 33
    expected = oracles.experts(rows.bfloat16(), gates, chosen, layer.linear_fc1.weight, layer.linear_fc2.weight)
    actual, _ = layer(rows.bfloat16(), tokens, gates)  # fp32 gates, as of a router in fp32
    assert actual.dtype == torch.bfloat16
    # Each step between the rows and the output is rounded; the loss's gradient of the output is in bf16, too.
    assert_close(actual, expected, 2**-6)
    for ours, theirs in zip(gradients(actual, [rows, gates]), gradients(expected, [rows, gates]), strict=True):
        assert_close(ours, theirs, 2**-6)


def test_gradients_of_two_microbatches_are_summed_in_the_buffers_of_data_parallelism(
    one_rank: Mesh, grouped: Layer
) -> None:
    layer = grouped(one_rank)
    batches = [sorted_rows([5, 0, 40, 2]), sorted_rows([0, 0, 3, 1])]
    wanted = [layer.linear_fc1.weight, layer.linear_fc2.weight]
    expected = [gradients(layer(*batch)[0], wanted) for batch in batches]
    for weight in wanted:
        weight.grad = None
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(layer.config, settings, layer)
    wrapped.zero_grad_buffer()
    for batch in batches:
        output, _ = wrapped(*batch)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        (output.double() * weights).sum().backward()
    for weight, first, second in zip(wanted, *expected, strict=True):
        assert_close(weight.main_grad, first + second, 2e-6)
        assert weight.grad is None


def test_every_weight_is_summed_over_the_data_parallel_ranks_of_experts(one_rank: Mesh, grouped: Layer) -> None:
    for weight in grouped(one_rank).parameters():
        assert weight.allreduce is False
        assert weight.tensor_model_parallel is True


@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("num_blocks", [1, 2], ids=["fused", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapters_are_added_to_the_weights(dtype: torch.dtype, num_blocks: int, rank: int) -> None:
    """Also with a block for each projection, so that products read parts of wider tensors, and with padded ranks."""
    counts, config = [5, 0, 40, 3], small_config()
    rows, tokens, gates = sorted_rows(counts)
    weights = [torch.randn(4, 2 * 48, 32) / 6, torch.randn(4, 32, 48) / 7]
    a_ERI, b_EOr = torch.randn(4, num_blocks * rank, 32) / 6, torch.randn(4, 2 * 48, rank)
    wanted = [tensor.to(dtype).requires_grad_() for tensor in (rows.detach(), a_ERI, b_EOr)]
    exact = [tensor.detach().double().requires_grad_() for tensor in wanted]
    fc1 = Linear(weights[0].to(dtype), None, LowRank(wanted[1], wanted[2], 0.5))
    output = grouped_experts(wanted[0], gates.to(dtype), fc1, Linear(weights[1].to(dtype), None), tokens, config)
    blocks = zip(exact[1].chunk(num_blocks, 1), exact[2].chunk(num_blocks, 1), strict=True)
    added = torch.cat([part @ block for block, part in blocks], 1)
    chosen = [expert for expert, count in enumerate(counts) for _ in range(count)]
    merged = fc1.weight_EOI.double() + 0.5 * added
    expected = oracles.experts(exact[0], gates.to(dtype).double(), chosen, merged, weights[1].to(dtype).double())
    # bf16 has eight bits, and rounds four products one after another.
    relative = 2e-6 if dtype is torch.float32 else 0.02
    assert_close(output, expected, relative)
    for ours, theirs in zip(gradients(output, wanted), gradients(expected, exact), strict=True):
        assert_close(ours, theirs, relative)
