"""Routes, losses and gradients of one rank, and comparisons of other meshes with them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from mcore_rl.config.mesh import MeshConfig
from tests.parallel.parity import Tensors, assembled, config_of, largest, random_weights, relative_errors
from tests.parallel.replaying import Case, SavedRoutes, replay_all, tiny
from tests.ranks import run_ranks

MODELS = {
    "qwen3_moe": tiny("qwen3_moe"),
    "qwen3_moe-8": tiny("qwen3_moe", num_layers=8),
    "qwen3_moe-shallow": tiny("qwen3_moe", num_layers=2),
    "deepseek_v3": tiny("deepseek_v3"),
    "deepseek_v3-8": tiny("deepseek_v3", num_layers=8),
    "deepseek_v3-shallow": tiny("deepseek_v3", num_layers=3),
    "qwen3_moe-full": tiny("qwen3_moe", capacity_factor=1.0),
    "deepseek_v3-full": tiny("deepseek_v3", capacity_factor=1.0),
    "qwen3_moe-allgather": tiny("qwen3_moe", num_layers=2, dispatcher="allgather"),
    "deepseek_v3-mtp": tiny("deepseek_v3", mtp=1),
    # A token takes 2 experts of each group, which is ranked by its best one.
    "deepseek_v2-shallow": tiny("deepseek_v2", num_layers=3, top_k=4),
    "glm_moe_dsa": tiny("glm_moe_dsa"),
    "qwen3_next": tiny("qwen3_next"),
    **{
        f"{family}-shallow": tiny(family, num_layers=2)
        for family in (
            *("deepseek_v32", "dots1", "glm4_moe_lite", "glm_moe_dsa"),
            *("minimax_m2", "qwen3_5_moe_text", "qwen3_next", "solar_open"),
        )
    },
}
LAYOUTS = ("packed", "padded")


class Outcome(NamedTuple):
    """Results of one layout of one case, of all ranks together."""

    free: dict[int, float]
    same: dict[int, float]
    recorded: dict[int, dict[int, list[int]]]
    losses: dict[int, float]
    gradients: Tensors
    metrics: dict[str, Any]
    unchanged: dict[str, Any]
    errors: list[str]
    accounts: list[list[dict[str, int]]]


def together(ranks: Sequence[dict[str, Any]]) -> Outcome:
    """Merge what each rank returned."""
    recorded: dict[int, dict[int, list[int]]] = {}
    for rank in ranks:
        for layer, routes in rank.get("recorded", {}).items():
            recorded.setdefault(layer, {}).update(routes)
    return Outcome(
        *({name: x for rank in ranks for name, x in rank.get(key, {}).items()} for key in ("free", "same")),
        recorded,
        {name: x for rank in ranks for name, x in rank["losses"].items()},
        assembled([rank["gradients"] for rank in ranks]),
        ranks[0]["metrics"],
        ranks[0].get("unchanged", {}),
        [rank["error"] for rank in ranks],
        [rank["accounts"] for rank in ranks],
    )


class Reference(NamedTuple):
    """Weights of one rank, its routes by layout, and its losses and gradients."""

    weights: Tensors
    saved: dict[str, dict[int, SavedRoutes]]
    outcomes: dict[str, Outcome]


@functools.cache
def one_rank(model: str) -> Reference:
    """Run a model on one rank, in each layout."""
    weights = random_weights(config_of(MODELS[model], MeshConfig()))
    # The bias of the MTP layer's router, which is not imposed, moves with each layout.
    layouts = ("packed",) if model.endswith("mtp") else LAYOUTS
    case = Case(model=model, mesh=MeshConfig(), layouts=layouts)
    ((found,),) = run_ranks(replay_all, 1, [case], MODELS, {model: weights}, {})
    by_layout = dict(zip(layouts, found, strict=True))
    return Reference(
        weights,
        {layout: x["saved"] for layout, x in by_layout.items()},
        {layout: together([x]) for layout, x in by_layout.items()},
    )


def outcomes(cases: list[Case]) -> list[dict[str, Outcome]]:
    """Run cases whose worlds have one size; return the outcomes by layout."""
    models = sorted({case.model for case in cases})
    weights = {model: one_rank(model).weights for model in models}
    saved = {model: one_rank(model).saved for model in models}
    ranks = run_ranks(replay_all, cases[0].mesh.smallest_world, cases, MODELS, weights, saved)
    return [
        {
            layout: together([rank[index][place] for rank in ranks])
            for place, layout in enumerate(case.layouts)
        }
        for index, case in enumerate(cases)
    ]


def assert_equal(outcome: Outcome, reference: Outcome, tolerance: float = 1e-5) -> None:
    """Assert the same training with the same routes, each of which was consumed once."""
    assert outcome.errors == [""] * len(outcome.errors)
    assert_same_training(outcome, reference, tolerance)
    for name, (value, count) in reference.metrics.items():
        if name != "routes/cached_bytes":
            assert outcome.metrics[name] == pytest.approx((value, count), rel=1e-4), name
    for account in (account for rank in outcome.accounts for account in rank):
        assert account["consumed"] == account["expected"], account


def assert_unchanged(outcome: Outcome, reference: Outcome) -> None:
    """Assert that routes imposed on the weights that recorded them change no bit, and are those of one rank."""
    assert outcome.free == outcome.same
    assert outcome.unchanged["routes/changed_fraction"] == 0
    assert outcome.unchanged["routes/changed_tokens_fraction"] == 0
    assert {
        layer: {n: sorted(k) for n, k in routes.items()} for layer, routes in outcome.recorded.items()
    } == {layer: {n: sorted(k) for n, k in routes.items()} for layer, routes in reference.recorded.items()}


def assert_same_training(outcome: Outcome, reference: Outcome, tolerance: float = 1e-5) -> None:
    """Assert equal losses and gradients of other weights with the same routes."""
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-5)
    errors = relative_errors(outcome.gradients, reference.gradients)
    assert max(errors.values()) <= tolerance, f"gradients differ: {largest(errors)}"
