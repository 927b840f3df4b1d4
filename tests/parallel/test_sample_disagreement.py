"""The count of each sample's routes that have nothing in common with the trainer's, which a batch's average hides."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.model.build import copy_in
from mcore_rl.replay.cache import MicrobatchLayout
from mcore_rl.replay.disagreement import DisagreementLimit
from mcore_rl.replay.from_rollouts import RolloutRoutes, cache_rollout_routes
from tests.parallel.parity import MESHES, Tensors
from tests.parallel.replaying import LENGTHS, MODELS, Case, SavedRoutes, one_rank, opened, sample_tokens
from tests.ranks import run_ranks

MODEL = "qwen3_moe"
STRANGER = 5
"""Sample that the engine gives another request's routes."""
FIRST_CURRENT = {STRANGER: 6, 2: 9}
"""First position of samples of which older weights sampled the tokens before it."""


def engine_routes(saved: Mapping[int, SavedRoutes]) -> dict[int, torch.Tensor]:
    """The trainer's own routes `[T, L, K]`, but of one sample those of another."""
    routes = {n: saved[n].codes_nlK.to(torch.int16) for n in range(len(LENGTHS))}
    return routes | {STRANGER: routes[2]}


def with_stale_tokens(layout: MicrobatchLayout) -> MicrobatchLayout:
    rows = tuple(
        tuple(replace(span, first_current=FIRST_CURRENT.get(span.sample, 0)) for span in row) for row in layout.rows
    )
    return replace(layout, rows=rows)


def on_a_rank(
    mesh: MeshConfig, weights: Tensors, saved: Mapping[int, SavedRoutes]
) -> tuple[dict[int, tuple[int, int]], list[str], tuple[float, float], torch.Tensor]:
    case = Case(model=MODEL, mesh=mesh, layouts=("packed",), replay=ReplayConfig(kind="r3"))
    (run,) = opened(case, MODELS[MODEL])
    copy_in(run.state.chunks, weights)
    axis, routes = run.state.mesh.dp_cp, engine_routes(saved)
    generated = {
        n: RolloutRoutes(sample_tokens(n, run.state.config.model.vocab_size)[: LENGTHS[n]], routes[n])
        for n in range(axis.rank, len(LENGTHS), axis.size)
    }
    run.layouts = [with_stale_tokens(layout) for layout in run.layouts]
    cache_rollout_routes(run.cache, run.version, generated, run.layouts, run.state.mesh)
    with run.tape() as tape:
        run.evaluate(tape.observe())
        tape.finish()
    destroy_mesh()
    assert tape.totals is not None
    by_sample, totals = tape.disjoint_by_sample, tape.totals
    # So few tokens are no evidence: those of sixty completions like these are.
    many = {n: (60 * disjoint, 60 * compared) for n, (disjoint, compared) in by_sample.items()}
    limit = DisagreementLimit(case.replay, MODELS[MODEL].moe.top_k, [])
    problems = [*limit.problems_of_samples(many).values()]
    sums = (sum(totals.disjoint_L), sum(totals.current_L))
    return by_sample, problems, sums, totals.expert_choices_2LE


@pytest.mark.parametrize("mesh", ["1", "tp2-ep2", "cp2", "pp2-vpp2", "ep2"])
def test_a_strangers_routes_are_counted_for_its_sample_on_every_rank_that_has_a_part(mesh: str) -> None:
    """Against sets of experts, counted one by one."""
    reference = one_rank(MODEL)
    saved = reference.saved["packed"]
    expected = {
        n: (
            sum(
                not set(mine_K) & set(given_K)
                for mine_LK, given_LK in zip(saved[n].codes_nlK.tolist()[first:], given.tolist()[first:], strict=True)
                for mine_K, given_K in zip(mine_LK, given_LK, strict=True)
            ),
            (LENGTHS[n] - first) * MODELS[MODEL].num_layers,
        )
        for n, given in engine_routes(saved).items()
        for first in [FIRST_CURRENT.get(n, 0)]
    }
    assert [n for n, (disjoint, _) in expected.items() if disjoint] == [STRANGER]
    choices_2LE = torch.zeros(2, MODELS[MODEL].num_layers, MODELS[MODEL].moe.num_experts)
    for n, given in engine_routes(saved).items():
        for token in range(FIRST_CURRENT.get(n, 0), LENGTHS[n]):
            for layer, mine_K in enumerate(saved[n].codes_nlK[token].tolist()):
                for expert in mine_K:
                    choices_2LE[0, layer, expert] += 1
                    choices_2LE[1, layer, expert] += expert not in given[token, layer].tolist()
    ranks = run_ranks(on_a_rank, MESHES[mesh].smallest_world, MESHES[mesh], reference.weights, saved)
    assert {n: counts for counted, *_ in ranks for n, counts in counted.items()} == expected
    for counted, problems, totals, found_2LE in ranks:
        assert torch.equal(found_2LE, choices_2LE.double())
        assert totals == tuple(map(sum, zip(*expected.values(), strict=True)))
        assert counted == {n: expected[n] for n in counted}
        assert [problem.split(":")[0] for problem in problems] == [f"sample {STRANGER}"] * (STRANGER in counted)
