from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.layers.cpu.experts import CompiledExperts
from mcore_rl.model.layers.experts import GroupedExperts, sort_routes
from mcore_rl.model.layers.moe import MoELayer
from mcore_rl.storage.checkpoint import megatron_version
from tests.unit.model.layers.oracles import assert_close, gradients, small_config

SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_topk_scaling_factor": 2.5,
}
GELU = {"activation_func": torch.nn.functional.gelu}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "balanced": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
    "sigmoid with bias": SIGMOID,
    "another activation": GELU,
    "sigmoid with bias and another activation": SIGMOID | GELU,
    "dropping": {"moe_expert_capacity_factor": 0.5},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "all gathered": {"moe_token_dispatcher_type": "allgather"},
}


def experts_spec(experts: type, submodules: Any = None) -> Any:
    if megatron_version() == "0.16":
        return ModuleSpec(module=experts, submodules=submodules)
    return experts if submodules is None else lambda *args, **kwargs: experts(*args, submodules, **kwargs)


def ours_and_megatrons(
    mesh: Mesh, stacked_experts: type[GroupedExperts] = GroupedExperts, **changes: Any
) -> tuple[MoELayer, moe_layer.MoELayer]:
    """Two layers with the same weights: ours, and Megatron's with its sequential experts."""
    provider = LocalSpecProvider()
    parts = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    sequential = moe_layer.MoESubmodules(experts=experts_spec(SequentialMLP, parts))
    stacked = moe_layer.MoESubmodules(experts=experts_spec(stacked_experts))
    settings = small_config(**changes)
    ours = MoELayer(settings, stacked, pg_collection=mesh.groups)
    megatrons = moe_layer.MoELayer(settings, sequential, pg_collection=mesh.groups)
    with torch.no_grad():
        megatrons.router.load_state_dict(ours.router.state_dict())
        for index, expert in enumerate(megatrons.experts.local_experts):
            expert.linear_fc1.weight.copy_(ours.experts.linear_fc1.weight[index])
            expert.linear_fc2.weight.copy_(ours.experts.linear_fc2.weight[index])
    for layer in (ours, megatrons):
        layer.set_layer_number(1)
    return ours, megatrons


def weights_of(layer: moe_layer.MoELayer) -> list[Tensor]:
    """Router, fc1 and fc2 as leaves whose gradients can be compared."""
    return [layer.router.weight, layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight]


@pytest.mark.parametrize("experts", [GroupedExperts, CompiledExperts])
@pytest.mark.parametrize("router", ROUTERS)
def test_it_computes_what_megatrons_layer_does(one_rank: Mesh, router: str, experts: type[GroupedExperts]) -> None:
    ours, megatrons = ours_and_megatrons(one_rank, experts, **ROUTERS[router])
    assert ours.is_local == (router != "dropping" or experts is CompiledExperts)
    input = torch.randn(19, 3, 32, requires_grad=True)
    actual, expected = ours(input)[0], megatrons(input)[0]
    assert_close(actual, expected, 1e-6)
    d_input, d_router, d_fc1, d_fc2 = gradients(actual, [input, *weights_of(ours)])
    of_megatron = megatrons.experts.local_experts
    leaves = [weight for expert in of_megatron for weight in (expert.linear_fc1.weight, expert.linear_fc2.weight)]
    d_input_m, d_router_m, *d_experts = gradients(expected, [input, megatrons.router.weight, *leaves])
    assert_close(d_input, d_input_m, 1e-6)
    assert_close(d_router, d_router_m, 2e-6)
    assert_close(d_fc1, torch.stack(d_experts[::2]), 1e-6)
    assert_close(d_fc2, torch.stack(d_experts[1::2]), 1e-6)


def test_rows_are_sorted_by_expert_and_token_and_fill_up_where_an_expert_is_named_twice() -> None:
    routed_TE = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 1]]).bool()
    routes = sort_routes(torch.rand(3, 4) * routed_TE, routed_TE, 2)
    chosen = [(expert, token) for token, row in enumerate(routes.experts_TK.tolist()) for expert in row]
    assert [chosen[index] for index in routes.order_N.tolist()] == sorted(chosen)
    assert routes.order_N[routes.row_TK.flatten()].tolist() == list(range(6))
    assert routes.counts_E.tolist() == [sum(expert == e for expert, _ in chosen) for e in range(4)]
    assert routes.experts_TK[:2].tolist() == [[1, 2], [0, 2]] and 3 in routes.experts_TK[2]


def test_a_replayed_route_is_the_one_taken(one_rank: Mesh) -> None:
    ours, megatrons = ours_and_megatrons(one_rank, moe_enable_routing_replay=True)
    generator = torch.Generator().manual_seed(3)
    route = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(8)])
    for layer in (ours, megatrons):
        layer.router.router_replay.set_target_indices(route)
        layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    input = torch.randn(8, 1, 32)
    replayed = ours(input)[0]
    assert_close(replayed, megatrons(input)[0], 1e-6)
    ours.router.router_replay.clear_router_replay_action()
    assert not torch.allclose(ours(input)[0], replayed)


def test_two_forwards_before_the_first_backward_keep_their_own_routes(one_rank: Mesh) -> None:
    """As a pipeline runs them."""
    ours, _ = ours_and_megatrons(one_rank)
    inputs = [torch.randn(5, 1, 32, requires_grad=True) for _ in range(2)]
    alone = [gradients(ours(input)[0], [input])[0] for input in inputs]
    outputs = [ours(input)[0] for input in inputs]
    for output, input, expected in zip(outputs, inputs, alone, strict=True):
        assert torch.equal(gradients(output, [input])[0], expected)


def test_experts_start_from_the_random_state_of_experts(one_rank: Mesh) -> None:
    """The state that differs between expert-parallel ranks, so that experts do too; the default one is left alone."""
    model_parallel_cuda_manual_seed(1)
    before = torch.get_rng_state()
    first = GroupedExperts(4, small_config(), pg_collection=one_rank.groups)
    assert torch.equal(before, torch.get_rng_state())
    weights = [*first.linear_fc1.weight, *first.linear_fc2.weight]
    assert len({weight.sum().item() for weight in weights}) == len(weights)
    model_parallel_cuda_manual_seed(1)
    second = GroupedExperts(4, small_config(), pg_collection=one_rank.groups)
    assert torch.equal(first.linear_fc2.weight, second.linear_fc2.weight)
