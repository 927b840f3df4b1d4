"""Routes of one rank, imposed on every mesh, give its losses and gradients; broken replay does not.

Known mistakes of routing replay, introduced on a rank whose tape is armed.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.model.build import unwrap
from mcore_rl.replay.router_hooks import ChunkMicrobatch, ChunkRouters, RouterHook
from mcore_rl.train.state import TrainState
from tests.parallel.parity import MESHES, largest, relative_errors
from tests.parallel.replaying import (
    LAYOUTS,
    MODELS,
    Case,
    Outcome,
    assert_equal,
    assert_same_training,
    assert_unchanged,
    one_rank,
    outcomes,
    replayed_by_hand,
    together,
)
from tests.ranks import run_ranks


def stations(state: TrainState) -> list[ChunkRouters]:
    """Return the routers of each chunk that the armed tape has hooks in."""
    hooks = [router.router_replay for chunk in state.chunks for _, router in replayed_routers(chunk)]
    assert all(isinstance(hook, RouterHook) for hook in hooks)
    return list({id(hook._chunk_routers): hook._chunk_routers for hook in hooks}.values())


def arm_all_routers_of_the_process(state: TrainState) -> None:
    """Let the chunk that is armed last arm all others: their recomputation takes its routes."""
    latest: list[ChunkMicrobatch] = []

    def arming(station: ChunkRouters) -> None:
        original = station.forward

        @contextmanager
        def forward(visit: ChunkMicrobatch) -> Iterator[None]:
            latest[:] = [visit]
            with original(visit):
                yield

        current = station.current
        station.forward = forward  # type: ignore[method-assign]
        station.current = lambda column: current(column) if station._in_forward else (latest[0], False)  # type: ignore[method-assign]

    for station in stations(state):
        arming(station)


def recompute_with_the_latest_forward(state: TrainState) -> None:
    """Switch nothing after the forward pass: recomputation takes the routes of a later microbatch."""

    def keeping(station: ChunkRouters) -> None:
        original = station.forward

        @contextmanager
        def forward(visit: ChunkMicrobatch) -> Iterator[None]:
            with original(visit):
                yield
            station._in_backward = visit

        station.forward = forward  # type: ignore[method-assign]
        station._begin_backward = lambda visit: None  # type: ignore[method-assign]

    for station in stations(state):
        keeping(station)


def batched_messages(state: TrainState) -> None:
    """Batch the messages of interleaved stages on two ranks: both directions are confused."""
    for chunk in state.chunks:
        config = unwrap(chunk).config
        config.overlap_p2p_comm, config.batch_p2p_comm = False, True


FAMILIES = ("qwen3_moe", "deepseek_v3")
EVERY_AXIS = (
    *("tp2", "pp2", "pp2-vpp2", "ep2", "tp2-ep2", "tp2-etp2", "cp2", "dp2", "cp2-pp2", "cp2-pp2-ep2"),
    *("tp2-pp2-vpp2", "pp4-vpp2", "pp2-vpp2-balanced"),
)
CAPACITY = ("qwen3_moe-full", "deepseek_v3-full")
"""Models whose experts have a capacity factor of 1."""


def model_of(family: str, mesh: str) -> str:
    """A model with a layer for each chunk of the mesh, and with two that have a router where there are no stages."""
    if mesh == "pp4-vpp2":
        return f"{family}-8"
    return family if MESHES[mesh].pp > 1 else f"{family}-shallow"


@pytest.mark.matrix("full-pp2-vpp2-qwen3_moe", "moe-cp2-pp2-ep2-deepseek_v3")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", EVERY_AXIS)
@pytest.mark.parametrize("recompute", ["none", "full", "moe"])
def test_routes_of_one_rank_give_its_gradients_on_every_mesh(recompute: str, mesh: str, family: str) -> None:
    """Without, with full, and with selective recomputation; packed and padded."""
    model = model_of(family, mesh)
    # Nothing is recomputed in the passes without gradients that record.
    case = Case(model=model, mesh=MESHES[mesh], recompute=recompute, same_weights=recompute == "none")
    (found,) = outcomes([case])
    for layout in LAYOUTS:
        assert_equal(found[layout], one_rank(model).outcomes[layout])
        if case.same_weights:
            assert_unchanged(found[layout], one_rank(model).outcomes[layout])
    again = {account["recomputed"] > 0 for rank in found["packed"].accounts for account in rank}
    assert again == {recompute != "none"}


OTHERS = [
    # A bias next to the router's matrix, and a ranking of groups that is not Megatron's.
    *[(model, "tp2-ep2") for model in ("minimax_m2", "deepseek_v2", "dots1", "glm4_moe_lite", "solar_open")],
    # The keys are chosen anew in each pass, alike on every mesh; layers that share a choice are computed again.
    *[("glm_moe_dsa", mesh) for mesh in ("tp2-ep2", "cp2", "pp2")],
    ("deepseek_v32", "tp2-ep2"),
    *[("qwen3_next", mesh) for mesh in ("tp2-ep2", "cp2", "pp2-vpp2")],
    ("qwen3_5_moe_text", "tp2-ep2"),
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh"), OTHERS)
def test_routes_of_other_families_give_their_gradients(family: str, mesh: str) -> None:
    """Gated delta nets amplify sums in another order, hence their tolerance; routes and accounts are exact."""
    model = model_of(family, mesh)
    (found,) = outcomes([Case(model=model, mesh=MESHES[mesh], recompute="full")])
    for layout in LAYOUTS:
        tolerance = 1e-5 if MODELS[model].delta.full_every is None else 3e-4
        assert_equal(found[layout], one_rank(model).outcomes[layout], tolerance)


@pytest.mark.matrix("qwen3_moe")
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_moe-shallow", "deepseek_v3-shallow"])
def test_replay_changes_many_routes_of_the_other_weights(model: str) -> None:
    """Else the matrix would compare nothing."""
    metrics = one_rank(model).outcomes["packed"].metrics
    changed, count = metrics["routes/changed_fraction"]
    assert 0.2 < changed / count < 0.8


@pytest.mark.matrix("full-cp2")
@pytest.mark.parametrize("mesh", ["tp2", "pp2-vpp2", "ep2", "cp2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_multi_token_prediction_routes_for_itself(recompute: str, mesh: str) -> None:
    (found,) = outcomes([Case(model="deepseek_v3-mtp", mesh=MESHES[mesh], recompute=recompute, layouts=("packed",))])
    reference = one_rank("deepseek_v3-mtp").outcomes["packed"]
    assert sorted(reference.recorded) == [1, 2, 3]
    assert_equal(found["packed"], reference)
    assert_unchanged(found["packed"], reference)


@pytest.mark.full
def test_the_dispatcher_does_not_matter() -> None:
    model = "qwen3_moe-allgather"
    (found,) = outcomes([Case(model=model, mesh=MESHES["tp2-ep2"], recompute="full")])
    for layout, outcome in found.items():
        assert_equal(outcome, one_rank(model).outcomes[layout])
        assert_unchanged(outcome, one_rank(model).outcomes[layout])


@pytest.mark.full
def test_in_bf16_the_same_weights_give_the_same_bits() -> None:
    """The routes of fp32 are then imposed: the accounts hold."""
    cases = [
        Case(model="qwen3_moe", mesh=MESHES[mesh], recompute="full", precision="bf16") for mesh in ("pp2-vpp2", "tp2")
    ]
    for found in outcomes(cases):
        for outcome in found.values():
            assert outcome.free == outcome.same
            assert outcome.unchanged["routes/changed_fraction"] == 0
            assert outcome.errors == ["", ""]


@functools.cache
def oracle_of(model: str) -> dict[str, Outcome]:
    """Training under the routes and drops of one rank, imposed without the tape."""
    weights = one_rank(model).weights
    (found,) = run_ranks(replayed_by_hand, 1, MODELS[model], weights, LAYOUTS)
    assert all((layout["dropped"] > 0) == (model in CAPACITY) for layout in found)
    blank = {"metrics": {}, "error": "", "accounts": []}
    return {layout: together([x | blank]) for layout, x in zip(LAYOUTS, found, strict=True)}


@pytest.mark.matrix("deepseek_v3", "qwen3_moe-full")
@pytest.mark.parametrize("model", [*FAMILIES, *CAPACITY])
def test_routes_of_one_rank_are_recorded_and_imposed_as_an_oracle_does(model: str) -> None:
    """R2 against the formula, on the rank with which all meshes are compared: nothing of replay is in the oracle."""
    for layout, oracle in oracle_of(model).items():
        assert_same_training(one_rank(model).outcomes[layout], oracle)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *(("qwen3_moe-full", mesh) for mesh in ("tp2", "pp2-vpp2", "ep2", "tp2-ep2", "cp2")),
        ("deepseek_v3-full", "cp2-pp2-ep2"),
    ],
)
def test_what_one_rank_dropped_is_dropped_on_every_mesh(model: str, mesh: str, recompute: str) -> None:
    """With the weights of the record each mesh drops the same by itself; with others it drops as recorded."""
    (found,) = outcomes([Case(model=model, mesh=MESHES[mesh], recompute=recompute)])
    recorded = one_rank(model).outcomes["packed"].recorded.values()
    codes = [code for routes in recorded for codes in routes.values() for code in codes]
    assert 0 < sum(code >= 8 for code in codes) < len(codes) / 2
    for layout, outcome in found.items():
        assert outcome.errors == [""] * len(outcome.errors)
        assert_same_training(outcome, oracle_of(model)[layout])


@pytest.mark.matrix("pp2-full-recompute_with_the_latest_forward-in recomputation")
@pytest.mark.parametrize(
    ("mesh", "recompute", "mistake", "message"),
    [
        ("pp2-vpp2", "full", arm_all_routers_of_the_process, "in recomputation"),
        ("pp4-vpp2", "full", arm_all_routers_of_the_process, "in recomputation"),
        ("pp2", "full", recompute_with_the_latest_forward, "in recomputation"),
        ("pp2-vpp2", "none", batched_messages, ""),
    ],
)
def test_the_known_mistakes_give_other_gradients(mesh: str, recompute: str, mistake: Any, message: str) -> None:
    """The comparison sees each; the witness sees those that are about routes."""
    model = model_of("qwen3_moe", mesh)
    case = Case(model=model, mesh=MESHES[mesh], recompute=recompute, layouts=("padded",), sabotage=mistake)
    (found,) = outcomes([case])
    outcome, reference = found["padded"], one_rank(model).outcomes["padded"]
    errors = relative_errors(outcome.gradients, reference.gradients)
    assert max(errors.values()) > 1e-3, largest(errors)
    assert len(set(outcome.errors)) == 1, "ranks disagree"
    assert bool(outcome.errors[0]) == bool(message), outcome.errors
    if message:
        assert re.search(rf"layer \d, microbatch \d \(samples .*({message})", outcome.errors[0])
