"""Layers cut over ranks compute what they compute whole."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.vocab import zigzag
from mcore_rl.model.build import build_model
from mcore_rl.model.layers.attention import SDPAttention, packed_params
from mcore_rl.model.layers.linear import ReplicatedLinear
from tests.parallel.parity import unzigzag
from tests.ranks import run_ranks
from tests.tiny_models import TINY
from tests.unit.model.layers import oracles
from tests.unit.model.layers.oracles import assert_close, small_config

ATTENTIONS: dict[str, dict[str, Any]] = {
    "own kernel": {"length": 256},
    "torch's kernel": {"length": 40},
    "window": {"length": 40, "window": 11},
    "values of another width": {"length": 40, "value_width": 6},
    "packed": {"length": 104, "lengths": (64, 32, 8)},
    "packed, own kernel": {"length": 768, "lengths": (512, 256)},
}


def tensors(length: int, rows: int, value_width: int = 8) -> list[Tensor]:
    """Queries, keys, values, and the weights of the loss, the same on all ranks."""
    generator = torch.Generator().manual_seed(4)
    shapes = [
        (length, rows, 4, 8),
        (length, rows, 2, 8),
        (length, rows, 2, value_width),
        (length, rows, 4 * value_width),
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def on_ranks(ranks: int, case: dict[str, Any]) -> list[Tensor]:
    """On a rank: its zig-zag part of the output and of the gradients of queries, keys and values."""
    mesh = build_mesh(MeshConfig(cp=ranks))
    lengths = case.get("lengths")
    whole = tensors(case["length"], 1 if lengths else 2, case.get("value_width", 8))

    def local(full: Tensor) -> Tensor:
        sequences = full.split(lengths or [case["length"]])
        return torch.cat([zigzag(sequence, mesh.cp, dim=0) for sequence in sequences])

    query, key, value, weights = (local(tensor) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    window = case.get("window")
    config = small_config(context_parallel_size=ranks, window_size=window and (window, 0))
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self", pg_collection=mesh.groups)
    if lengths:
        packed = packed_params(lengths, torch.device("cpu"))
        output = attention(*(leaf[:, 0] for leaf in leaves), None, packed_seq_params=packed)[:, None]
    else:
        output = attention(*leaves, None)
    (output * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.matrix("own kernel-2", "window-4")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_context_parallel_attention_is_that_of_the_closed_form(name: str, ranks: int) -> None:
    case = ATTENTIONS[name]
    if ranks == 4 and name == "own kernel":
        case = case | {"length": 512}
    lengths = case.get("lengths") or (case["length"],)
    query, key, value, weights = tensors(case["length"], 1 if "lengths" in case else 2, case.get("value_width", 8))
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    visible = torch.block_diag(*[oracles.causal(n, n, case.get("window")) for n in lengths]).bool()
    output = oracles.attention(*leaves, visible, 8**-0.5).flatten(2)
    (output * weights).sum().backward()
    expected = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    results = run_ranks(on_ranks, ranks, ranks, case)
    for index, whole in enumerate(expected):
        parts = [rank[index].split([length // ranks for length in lengths]) for rank in results]
        joined = torch.cat([unzigzag(list(sequence), dim=0) for sequence in zip(*parts, strict=True)])
        assert_close(joined, whole, 1e-5)


def linears_on_ranks(is_sequence_parallel: bool) -> list[Tensor]:
    """On a rank: output and gradients of a column-parallel layer into a row-parallel one, whole."""
    mesh = build_mesh(MeshConfig(tp=2))
    seed_ranks(1)
    config = small_config(tensor_model_parallel_size=2, sequence_parallel=is_sequence_parallel)
    common: dict[str, Any] = {
        "config": config,
        "init_method": config.init_method,
        "bias": False,
        "skip_bias_add": False,
    }
    column = ColumnParallelLinear(32, 64, gather_output=False, tp_group=mesh.tp.group, **common)
    row = RowParallelLinear(64, 32, input_is_parallel=True, tp_group=mesh.tp.group, **common)
    first, second, input, weights = linear_tensors()
    with torch.no_grad():
        column.weight.copy_(first.chunk(2)[mesh.tp.rank])
        row.weight.copy_(second.chunk(2, 1)[mesh.tp.rank])
    if is_sequence_parallel:
        input, weights = (tensor.chunk(2)[mesh.tp.rank].clone() for tensor in (input, weights))
    input.requires_grad_()
    output = row(column(input)[0])[0]
    (output * weights).sum().backward()
    return [output.detach(), input.grad, column.weight.grad, row.weight.grad]  # type: ignore[list-item]


def linear_tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = [(64, 32), (32, 64), (24, 2, 32), (24, 2, 32)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("is_sequence_parallel", [True, False])
def test_tensor_parallel_linears_have_the_gradients_of_whole_ones(is_sequence_parallel: bool) -> None:
    first, second, input, weights = (tensor.double() for tensor in linear_tensors())
    leaves = [tensor.requires_grad_() for tensor in (input, first, second)]
    output = input @ first.t() @ second.t()
    (output * weights).sum().backward()
    ranks = run_ranks(linears_on_ranks, 2, is_sequence_parallel)
    outputs, d_inputs, d_first, d_second = zip(*ranks, strict=True)
    joined = torch.cat if is_sequence_parallel else lambda parts: parts[0]
    assert_close(joined(outputs), output.detach(), 1e-6)
    assert_close(joined(d_inputs), leaves[0].grad, 1e-6)  # type: ignore[arg-type]
    assert_close(torch.cat(d_first), leaves[1].grad, 1e-6)  # type: ignore[arg-type]
    assert_close(torch.cat(d_second, 1), leaves[2].grad, 1e-6)  # type: ignore[arg-type]


def replicated_on_ranks() -> list[Tensor]:
    """On a rank: a replicated layer's first weight, and its gradient summed as Megatron sums marked ones."""
    mesh = build_mesh(MeshConfig(tp=2))
    seed_ranks(1)
    config = small_config(tensor_model_parallel_size=2, sequence_parallel=True)
    torch.rand(3)  # ranks may have drawn from the default state
    layer = ReplicatedLinear(
        32,
        16,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name="down",
        skip_weight_param_allocation=False,
        tp_group=mesh.tp.group,
    )
    assert layer.weight.sequence_parallel
    part = linear_tensors()[2].chunk(2)[mesh.tp.rank]
    output, bias = layer(part)
    assert bias is None
    output.square().sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    torch.distributed.all_reduce(gradient, group=mesh.tp.group)
    return [layer.weight.detach(), gradient]


def test_a_replicated_layer_starts_equal_and_its_marked_gradient_sums_to_the_whole() -> None:
    (weight, gradient), (other_weight, _) = run_ranks(replicated_on_ranks, 2)
    assert torch.equal(weight, other_weight)
    whole = linear_tensors()[2].double()
    leaf = weight.double().requires_grad_()
    (whole @ leaf.t()).square().sum().backward()
    assert_close(gradient, leaf.grad, 1e-6)  # type: ignore[arg-type]


def latent_without_sequence_parallelism() -> str:
    """On a rank: what is said of latent attention whose rotary key would miss the other ranks' heads."""
    config = MeshConfig(tp=2, sequence_parallel=False)
    mesh = build_mesh(config)
    seed_ranks(1)
    try:
        build_model(TINY["deepseek_v3"], mesh, start(PlatformConfig(layers="torch")), PlatformConfig(layers="torch"))
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_latent_attention_over_tensor_ranks_needs_sequence_parallelism() -> None:
    answers = run_ranks(latent_without_sequence_parallelism, 2)
    assert all("mesh.sequence_parallel=true" in answer for answer in answers)
