"""The conformance kit on this package: every format, mesh, damage and some faults."""

import sys

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.rl.measure.conformance import RoutedModel, conformance
from tests.parallel.conforming import model_of, runner
from tests.parallel.parity import config_of, random_weights
from tests.parallel.replay_mutants import MUTANTS

FAULTS = (
    "layers in reverse in the hook",
    "gates of the live choice",
    "routes imposed in the forward pass only",
)


@pytest.mark.matrix("one-tp2-ep2")
@pytest.mark.parametrize("meshes", [("one", "tp2-ep2"), ("one", "cp2", "pp2-vpp2")], ids="-".join)
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
