"""The conformance kit on this package: every format, mesh, damage and some faults."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.model.build import copy_in
from mcore_rl.replay.from_rollouts import RolloutRoutes, cache_rollout_routes
from mcore_rl.testing.conformance import ReplayPass, ReplayResult, RoutedModel, RunPasses, conformance
from tests.parallel.parity import MESHES, Tensors, assembled, config_of, random_weights
from tests.parallel.replay_mutants import MUTANTS, Mutant, applied
from tests.parallel.replaying import IDS, LENGTHS, Case, Run, opened, perturbed, sample_tokens, tiny
from tests.ranks import run_ranks
from tests.tiny_models import shallow


def model_of(meshes: Sequence[str]) -> ModelConfig:
    """The model for these meshes, without the routers' losses."""
    return shallow(tiny("qwen3_moe"), *(MESHES[mesh] for mesh in meshes))


def runner(model: ModelConfig, weights: Tensors, mutant: Mutant | None = None) -> RunPasses:
    """Run passes on new ranks, with recomputation, under a fault or none."""

    def run(mesh: str, passes: Sequence[ReplayPass]) -> list[ReplayResult]:
        size = MESHES[mesh].smallest_world
        ranks = run_ranks(passes_of_rank, size, MESHES[mesh], model, weights, list(passes), mutant)
        return [together(of_pass) for of_pass in zip(*ranks, strict=True)]

    return run


def together(ranks: Sequence[dict[str, Any]]) -> ReplayResult:
    errors = {found.get("error") for found in ranks}
    assert len(errors) == 1, f"the ranks disagree: {errors}"
    if (error := errors.pop()) is not None:
        return ReplayResult(error=error)
    losses = {name: loss for found in ranks for name, loss in found["losses"].items()}
    layers: dict[int, dict[int, list[int]]] = {}
    for found in ranks:
        for layer, routes in found.get("routes", {}).items():
            layers.setdefault(layer, {}).update(routes)
    return ReplayResult(
        # The last token of a sample is only a label.
        logprobs=tuple(
            torch.tensor([-losses[sample * IDS + t] for t in range(length - 1)])
            for sample, length in enumerate(LENGTHS)
        ),
        routes=tuple(
            torch.tensor([[layers[layer][sample * IDS + t] for layer in sorted(layers)] for t in range(length)])
            for sample, length in enumerate(LENGTHS)
            if layers
        ),
        gradients=assembled([found["gradients"] for found in ranks]) if "gradients" in ranks[0] else {},
    )


def passes_of_rank(
    mesh: MeshConfig, model: ModelConfig, weights: Tensors, passes: list[ReplayPass], mutant: Mutant | None
) -> list[dict[str, Any]]:
    """On a rank: losses, routes, pieces of gradients, or the message of a RoutingError, of each pass."""
    case = Case(model="", mesh=mesh, recompute="full", layouts=("packed",), replay=ReplayConfig(kind="r3"))
    (run,) = opened(case, model)
    results = []
    with applied(mutant):
        for one in passes:
            copy_in(run.state.chunks, weights if one.weights == "old" else perturbed(weights))
            run.cache.drop(run.version)
            try:
                results.append(result_of(run, one))
            except RoutingError as error:
                results.append({"error": str(error)})
    destroy_mesh()
    return results


def result_of(run: Run, one: ReplayPass) -> dict[str, Any]:
    if one.kind == "live":
        losses, gradients = run.gradients()
        return {"losses": losses, "gradients": gradients}
    if one.kind == "impose":
        assert one.routes is not None
        axis = run.state.mesh.dp_cp
        generated = {
            n: RolloutRoutes(sample_tokens(n, run.state.config.model.vocab_size)[: LENGTHS[n]], one.routes[n])
            for n in range(axis.rank, len(LENGTHS), axis.size)
        }
        cache_rollout_routes(run.cache, run.version, generated, run.layouts, run.state.mesh)
    with run.tape() as tape:
        routing = tape.record() if one.kind == "record" else tape.impose()
        found: dict[str, Any] = {}
        if one.backward:
            found["losses"], found["gradients"] = run.gradients(routing)
        else:
            found["losses"] = run.evaluate(routing)
        tape.finish()
    if one.kind == "record":
        found["routes"] = run.routes()
    return found


FAULTS = ("layers in reverse in the hook", "gates of the live choice", "routes imposed in the forward pass only")


@pytest.mark.full
@pytest.mark.parametrize("meshes", [("1", "tp2-ep2"), ("1", "cp2", "pp2-vpp2")], ids="-".join)
def test_this_package_conforms(meshes: tuple[str, ...]) -> None:
    model = model_of(meshes)
    weights = random_weights(config_of(model, MeshConfig()))
    found = conformance(
        runner(model, weights),
        RoutedModel(num_layers=model.num_layers, num_experts=model.moe.num_experts, top_k=model.moe.top_k),
        meshes,
        faults={mutant.name: runner(model, weights, mutant) for mutant in MUTANTS if mutant.name in FAULTS},
    )
    sys.stdout.write(f"\n{found.table()}\n")
    assert not found.failures
    verdicts = {(row.group, row.case, row.mesh): row.verdict for row in found.rows}
    assert len(verdicts) == 1 + 18 * len(meshes) + len(FAULTS)
    refused = {fault for fault in FAULTS if verdicts["faults", fault, meshes[-1]] == "refused"}
    # With pp2-vpp2 a chunk has one layer, of which there is no other order.
    assert refused == set(FAULTS[1:] if meshes[-1] == "pp2-vpp2" else FAULTS)
    for mesh in meshes:
        for damage in ("an expert twice", "an expert out of range", "one token short", "one layer short"):
            assert verdicts["damage", damage, mesh] == "refused"
        assert verdicts["damage", "shifted by one token", mesh] == "ok"
