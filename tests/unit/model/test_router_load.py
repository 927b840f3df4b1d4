"""Counts of a real model on one rank agree with counts by hand from the routers' inputs."""

import math
import re

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.routers import routers
from mcore_rl.metrics.metrics import reduced
from mcore_rl.model.build import build_model
from mcore_rl.model.router_load import ExpertLoads, RouterLoad, load_entropy, load_max_over_mean
from tests.ranks import run_ranks
from tests.tiny_models import TINY

ROWS, LENGTH = 2, 16
MOE = TINY["qwen3_moe"]
DEEPSEEK = TINY["deepseek_v3"].model_copy(update={"mtp_layers": 1})
FULL = PlatformConfig(recompute="full")
ROUTER = PlatformConfig(recompute="selective", recompute_modules=("moe",))


def with_moe(model: ModelConfig, **changes) -> ModelConfig:
    return model.model_copy(update={"moe": model.moe.model_copy(update=changes)})


def trained_counts(cases):
    """On a rank, for each (model, platform): RouterLoad's counts of two microbatches, and those by hand."""
    return [one_case(model, platform) for model, platform in cases]


def one_case(model, settings):
    platform = start(settings)
    mesh = build_mesh(MeshConfig())
    seed_ranks(1)
    chunks = build_model(model, mesh, platform, settings)
    load = RouterLoad(chunks)
    by_hand = HandCount(chunks[0])
    for step in range(2):
        tokens_BS = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        inputs = {
            "input_ids": tokens_BS,
            "position_ids": torch.arange(LENGTH).expand(ROWS, -1),
            "attention_mask": None,
            "labels": tokens_BS,
        }
        with torch.no_grad(), by_hand:
            chunks[0](**inputs)
        chunks[0](**inputs).sum().backward()
    gathered = load.gather(mesh)
    assert not load.gather(mesh).tokens_LE.any()
    destroy_mesh()
    return gathered, by_hand.tokens


class HandCount:
    """Reads what goes into each router, and chooses its experts again: the top k of the scores."""

    def __init__(self, chunk):
        # On one rank the names of the parameters contain the index of the layer.
        names = re.compile(r".*(decoder|mtp)\.layers\.(\d+)\..*router$")
        named = {names.fullmatch(name): module for name, module in chunk.named_modules()}
        first = {"decoder": 0, "mtp": chunk.config.num_layers}
        self.routers = {first[name[1]] + int(name[2]): router for name, router in named.items() if name}
        self.tokens = {layer: torch.zeros(router.num_experts) for layer, router in self.routers.items()}

    def __enter__(self):
        self.hooks = [
            router.register_forward_pre_hook(lambda router, inputs, layer=layer: self.count(layer, router, inputs[0]))
            for layer, router in self.routers.items()
        ]

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def count(self, layer: int, router: TopKRouter, hidden_SBD):
        scores_TE = (hidden_SBD.double() @ router.weight.double().T).flatten(0, 1)
        chosen = scores_TE.topk(router.topk).indices.flatten()
        self.tokens[layer] += torch.bincount(chosen, minlength=router.num_experts)


def test_a_training_token_is_counted_once_whatever_is_recomputed_and_evaluation_is_not():
    results = run_ranks(trained_counts, 1, [(MOE, PlatformConfig()), (MOE, FULL), (MOE, ROUTER)])[0]
    for gathered, by_hand in results:
        assert len(by_hand) == MOE.num_layers
        for layer, tokens_E in by_hand.items():
            assert gathered.tokens_LE[layer].tolist() == tokens_E.tolist()
        assert gathered.tokens_LE.sum(1).tolist() == [2 * ROWS * LENGTH * MOE.moe.top_k] * MOE.num_layers
        assert not gathered.dropped_L.any()


def loads_behind_the_bias(model):
    """On a rank: of a bf16 model, the counts by which the biases will move, and the same counts as whole numbers."""
    settings = PlatformConfig(precision="bf16")
    platform, mesh = start(settings), build_mesh(MeshConfig())
    seed_ranks(1)
    chunks = build_model(model, mesh, platform, settings)
    load = RouterLoad(chunks)
    for step in range(3):
        tokens_BS = torch.randint(0, 64, (9, 128), generator=torch.Generator().manual_seed(step))
        positions_BS = torch.arange(128).expand(9, -1)
        inputs = {"input_ids": tokens_BS, "position_ids": positions_BS, "attention_mask": None}
        chunks[0](**inputs, labels=tokens_BS).sum().backward()
    found = {layer: router.local_tokens_per_expert for layer, router in routers(chunks[0])}
    return found, load.gather(mesh).tokens_LE


@pytest.mark.full
def test_the_expert_bias_of_a_bf16_model_moves_by_exact_counts():
    """bf16 has no odd numbers above 256, and none but multiples of 16 above 2,048."""
    [(found, counts_LE)] = run_ranks(loads_behind_the_bias, 1, TINY["deepseek_v3"])
    assert any(int(count) % 16 for count in counts_LE.flatten())
    assert {layer: tokens_E.tolist() for layer, tokens_E in found.items()} == {
        layer: counts_LE[layer].tolist() for layer in (1, 2, 3)
    }


@pytest.mark.full
def test_choices_beyond_an_experts_capacity_are_counted_as_dropped():
    model = with_moe(MOE, capacity_factor=0.5, balance="none")
    capacity = math.ceil(0.5 * ROWS * LENGTH * model.moe.top_k / model.moe.num_experts)
    [(gathered, _)] = run_ranks(trained_counts, 1, [(model, FULL)])[0]
    assert gathered.tokens_LE.max() <= 2 * capacity
    assert (gathered.dropped_L > 0).all()
    choices_L = gathered.tokens_LE.sum(1) + gathered.dropped_L
    assert choices_L.tolist() == [2 * ROWS * LENGTH * model.moe.top_k] * model.num_layers


def test_dense_layers_stay_zero_and_mtp_layers_come_last():
    [(gathered, by_hand)] = run_ranks(trained_counts, 1, [(DEEPSEEK, FULL)])[0]
    is_moe = [*DEEPSEEK.moe_layers, *[True] * DEEPSEEK.mtp_layers]
    choices = 2 * ROWS * LENGTH * DEEPSEEK.moe.top_k
    assert sorted(by_hand) == [layer for layer, moe in enumerate(is_moe) if moe]
    assert gathered.tokens_LE.sum(1).tolist() == [choices * moe for moe in is_moe]
    metrics = reduced(gathered.metrics())
    assert len(metrics["moe/expert_load"]) == DEEPSEEK.num_layers
    assert len(metrics["mtp/expert_load"]) == DEEPSEEK.mtp_layers
    assert f"moe/layer_{DEEPSEEK.num_layers - 1:02d}/load_entropy" in metrics
    assert "moe/layer_00/load_entropy" not in metrics
    assert "mtp/layer_00/load_entropy" in metrics


def test_an_even_load_is_one_and_a_load_on_one_expert_is_the_number_of_experts():
    even, one = torch.tensor([5, 5, 5, 5]), torch.tensor([20, 0, 0, 0])
    assert (load_max_over_mean(even), load_max_over_mean(one)) == (1, 4)
    assert (load_entropy(even), load_entropy(one)) == (pytest.approx(1), 0)
    half = torch.tensor([10, 10, 0, 0])
    assert load_entropy(half) == pytest.approx(math.log(2) / math.log(4))


def test_metrics_are_means_over_the_layers_that_route():
    loads = ExpertLoads(torch.tensor([[0, 0], [30, 10], [20, 20]]), torch.tensor([0, 5, 15]), num_layers=3)
    metrics = reduced(loads.metrics())
    assert metrics["moe/layer_01/load_max_over_mean"] == 1.5
    assert metrics["moe/load_max_over_mean"] == (1.5 + 1.0) / 2
    assert metrics["moe/dropped_tokens"] == 20
    assert metrics["moe/dropped_fraction"] == 0.2
    assert metrics["moe/expert_load"] == [[0, 0], [30, 10], [20, 20]]
    assert not any(name.startswith("mtp/") for name in metrics)
