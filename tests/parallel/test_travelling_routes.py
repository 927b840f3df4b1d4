"""Routes from other ranks, another layout or another mesh train as on one rank.

The count of each sample's routes that have nothing in common with the trainer's, which a batch's average hides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.model.build import copy_in
from mcore_rl.replay.cache import MicrobatchLayout, RoutingCache, SampleSpan
from mcore_rl.replay.disagreement import DisagreementLimit
from mcore_rl.replay.from_rollouts import RolloutRoutes, cache_rollout_routes
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.step.policy_routes import routes_of
from tests.generating import engine_on, prompt_of
from tests.parallel.parity import MESHES as BY_NAME
from tests.parallel.parity import Tensors
from tests.parallel.replaying import (
    IDS,
    LENGTHS,
    MODELS,
    VERSION,
    Case,
    Run,
    SavedRoutes,
    assert_same_training,
    microbatch_of,
    one_rank,
    opened,
    perturbed,
    replayed,
    replayed_by_hand,
    sample_tokens,
    together,
)
from tests.ranks import run_ranks

Recorded = dict[int, dict[int, list[int]]]


def as_rollout(sample: int, recorded: Recorded, vocab_size: int) -> RolloutRoutes:
    """Return recorded routes as an engine would: every token, all layers of the model."""
    layers = sorted(recorded)
    routes = [[recorded[layer][sample * IDS + n] for layer in layers] for n in range(LENGTHS[sample])]
    tokens_T = sample_tokens(sample, vocab_size)[: LENGTHS[sample]]
    return RolloutRoutes(tokens_T, torch.tensor(routes, dtype=torch.uint8))


NO_ROUTES = 3
"""Sample that the engine returned without routes."""


def positions_left_out(sample: int) -> list[int]:
    """Positions of a sample whose routes the engine left out: none, all, the first ones (from a server's cache), a part
    in the middle (a turn of a conversation), or every third.
    """
    length = LENGTHS[sample]
    return {
        0: [],
        NO_ROUTES: [*range(length)],
        4: [*range(length)],
        1: [0, 1, 2],
        2: [*range(5, 11)],
        5: [length - 1],
    }.get(sample, [*range(0, length, 3)])


def with_rows_left_out(sample: int, routes: RolloutRoutes) -> RolloutRoutes:
    """Return the routes as an engine would that leaves rows out."""
    experts_TLK = routes.experts_TLK.short()
    experts_TLK[positions_left_out(sample)] = -1
    return RolloutRoutes(routes.tokens_T, experts_TLK)


REPEATED_IN_ALL, REPEATED_IN_TWO = 4, 1
"""Samples of which an engine returned one token's routes for the five that follow: in all layers, in the first two."""


def with_rows_repeated(sample: int, routes: RolloutRoutes) -> RolloutRoutes:
    """Return the routes with those of token 2 at the five tokens after it."""
    experts_TLK = routes.experts_TLK.clone()
    if sample in (REPEATED_IN_ALL, REPEATED_IN_TWO):
        num_layers = 2 if sample == REPEATED_IN_TWO else experts_TLK.shape[1]
        experts_TLK[3:8, :num_layers] = experts_TLK[2, :num_layers]
    return RolloutRoutes(routes.tokens_T, experts_TLK)


class Traffic:
    """Bytes that this rank gives to collectives, by name; all_to_all counts only those for other ranks."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}

    @contextmanager
    def counted(self, axis_rank: int) -> Iterator[None]:
        """Count the collectives inside."""
        originals = {name: getattr(dist, name) for name in ("all_to_all_single", "broadcast", "all_gather")}

        def counting(name: str) -> Callable[..., Any]:
            def call(output: Tensor, given: Any, *args: Any, **kwargs: Any) -> Any:
                if name == "all_to_all_single":
                    sizes = args[1]
                    count = sum(size for rank, size in enumerate(sizes) if rank != axis_rank)
                else:
                    count = output.nbytes if isinstance(output, Tensor) else given.nbytes
                self.sent[name] = self.sent.get(name, 0) + count
                return originals[name](output, given, *args, **kwargs)

            return call

        for name in originals:
            setattr(dist, name, counting(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)


def trained_on_rollouts(
    meshes: Sequence[MeshConfig], model: ModelConfig, weights: Tensors, recorded: Recorded
) -> list[dict[str, Any]]:
    """Train on each mesh with routes that the engine returned to other replicas."""
    return [one_rollout(mesh, model, weights, recorded) for mesh in meshes]


def one_rollout(mesh_config: MeshConfig, model: ModelConfig, weights: Tensors, recorded: Recorded) -> dict[str, Any]:
    replay = ReplayConfig(kind="r3", missing="live")
    case = Case(model="", mesh=mesh_config, layouts=("packed",), replay=replay)
    (run,) = opened(case, model)
    mesh = run.state.mesh
    copy_in(run.state.chunks, perturbed(weights))
    mine = [n for n in range(len(LENGTHS)) if n % mesh.dp_cp.size == mesh.dp_cp.rank]
    generated = {n: as_rollout(n, recorded, model.vocab_size) for n in mine}
    traffic = Traffic()
    with traffic.counted(mesh.dp_cp.rank):
        cache_rollout_routes(run.cache, run.version, generated, run.layouts, mesh)
    # Of samples that other replicas generated: positions here, layers here, a byte for each choice, and checksums.
    entries = {n: run.cache.sample(run.version, n) for n in run.cache.samples(run.version)}
    row_bytes = len(run.cache.layers) * model.moe.top_k
    foreign = sum(
        len(entry.position_n) * row_bytes + 8 * len(run.cache.layers) for n, entry in entries.items() if n not in mine
    )
    expected_bytes = sum(len(entry.position_n) for entry in entries.values()) * row_bytes
    cached_bytes = run.cache.num_bytes, expected_bytes
    received = torch.tensor([foreign, traffic.sent.pop("all_to_all_single")])
    dist.all_reduce(received)
    outcome = replayed(run, None)
    with_gaps = {n: with_rows_left_out(n, routes) for n, routes in generated.items()}
    cache_rollout_routes(run.cache, run.version, with_gaps, run.layouts, mesh)
    left_out = replayed(run, None)
    copy_in(run.state.chunks, weights)
    # A stage is given its own layers, as by the native engine; one of them has none.
    columns = [run.cache.model_layers.index(layer) for layer in run.cache.layers]
    own = {
        n: RolloutRoutes(routes.tokens_T, with_rows_repeated(n, routes).experts_TLK[:, columns])
        for n, routes in generated.items()
    }
    (metric,) = cache_rollout_routes(run.cache, run.version, own, run.layouts, mesh)
    destroy_mesh()
    return outcome | {
        "left_out": left_out,
        "repeated": metric.value / metric.count,
        "moved": received.tolist(),
        "other_traffic": traffic.sent,
        "cached_bytes": cached_bytes,
    }


def other_layouts(dp_rank: int, dp_size: int) -> list[MicrobatchLayout]:
    """Return layouts with the samples in other rows on other replicas."""
    rows = [(7, 4), (6, 1, 3), (0, 5), (2,)]
    mine = rows[(dp_size - 1 - dp_rank) * len(rows) // dp_size : (dp_size - dp_rank) * len(rows) // dp_size]
    layouts = []
    for row in mine:
        spans = [SampleSpan(n, LENGTHS[n], -(-LENGTHS[n] // 8) * 8) for n in row]
        rest = 48 - sum(span.num_positions for span in spans)
        layouts.append(MicrobatchLayout(((*spans, SampleSpan(-1, 0, rest)),), row_length=48, packed=True))
    return layouts


def laid_out_otherwise(meshes: Sequence[MeshConfig], model: ModelConfig, weights: Tensors) -> list[dict[str, Any]]:
    """Record in one layout and replay in another on each mesh; then replay the routes of the mesh before."""
    results = []
    before: dict[int, SavedRoutes] = {}
    for index, mesh_config in enumerate(meshes):
        (run,) = opened(Case(model="", mesh=mesh_config, layouts=("padded",)), model)
        mesh = run.state.mesh
        copy_in(run.state.chunks, weights)
        tape = run.tape()
        run.evaluate(tape.record())
        tape.finish()
        recorded = run.routes()
        other = rebatched(run, other_layouts(mesh.dp.rank, mesh.dp.size))
        error = refused(other)
        other.load(run.saved())
        saved = run.saved()
        copy_in(run.state.chunks, perturbed(weights))
        outcome = [replayed(other, None)]
        if index:
            other.load(before)
            outcome.append(replayed(other, None))
        before = saved
        results.append({"outcome": outcome, "recorded": recorded, "error": error})
        destroy_mesh()
    return results


def rebatched(run: Run, layouts: list[MicrobatchLayout]) -> Run:
    made = [microbatch_of(layout, run.state) for layout in layouts]
    return Run(run.state, run.cache, run.version, layouts, [m for m, _ in made], [names for _, names in made])


def refused(run: Run) -> str:
    """Return the message with which a tape refuses to impose; "" when it does not."""
    try:
        run.tape().impose()
    except RoutingError as error:
        return str(error)
    return ""


def damaged_on_one_rank(model: ModelConfig) -> list[str]:
    """Flip a bit on the second of two replicas only, then remove a sample there; return both messages."""
    (run,) = opened(Case(model="", mesh=MeshConfig(dp=2), layouts=("padded",)), model)
    tape = run.tape()
    run.evaluate(tape.record())
    tape.finish()
    cache: RoutingCache = run.cache
    is_second = run.state.mesh.dp.rank == 1
    if is_second:
        entry = cache.sample(VERSION, 6)
        cache._storage._blocks[entry.block][entry.first, 1, 1] ^= 1
    tape = run.tape()
    run.evaluate(tape.impose())
    errors = []
    try:
        tape.finish()
    except RoutingError as error:
        errors.append(str(error))
    if is_second:
        del cache._samples[VERSION, 7]
    errors.append(refused(run))
    destroy_mesh()
    return errors


def trained_on_the_engines(
    meshes: Sequence[MeshConfig], model: ModelConfig, weights: Tensors
) -> list[dict[str, float]]:
    """Impose the native engine's routes of what it generated on other replicas' passes, on each mesh."""
    return [one_engine(mesh, model, weights) for mesh in meshes]


def one_engine(mesh_config: MeshConfig, model: ModelConfig, weights: Tensors) -> dict[str, float]:
    case = Case(model="", mesh=mesh_config, layouts=("packed",), replay=ReplayConfig(kind="r3"))
    (run,) = opened(case, model)
    mesh = run.state.mesh
    copy_in(run.state.chunks, weights)
    engine = engine_on(run.state.chunks, mesh, model)
    mine = [n for n in range(len(LENGTHS)) if n % mesh.dp_cp.size == mesh.dp_cp.rank]
    prompts = [prompt_of(sample_tokens(n, model.vocab_size)[:2].tolist(), str(n)) for n in mine]
    sampling = Sampling(max_new_tokens=14, cut=Cut(temperature=1.0), with_routes=True)
    groups = engine.generate(prompts, sampling, [[n] for n in mine])
    generated = {}
    for n, group in zip(mine, groups, strict=True):
        routes = routes_of(group.prompt, group.completions[0])
        assert routes is not None
        # As long as the sample of this number: a rollout may be cut anywhere.
        generated[n] = RolloutRoutes(routes.tokens_T[: LENGTHS[n]], routes.experts_TLK[: LENGTHS[n]])
    boxes: list[dict[int, list[int]]] = [{} for _ in range(mesh.world.size)]
    dist.all_gather_object(boxes, {n: routes.tokens_T.tolist() for n, routes in generated.items()})
    generated_tokens = {n: torch.tensor(tokens) for box in boxes for n, tokens in box.items()}
    lengths = {n: len(tokens) for n, tokens in generated_tokens.items()}
    assert all(lengths[n] == min(LENGTHS[n], 15) for n in lengths), lengths
    run = with_generated(run, generated_tokens)
    cache_rollout_routes(run.cache, run.version, generated, run.layouts, mesh)
    tape = run.tape()
    run.evaluate(tape.impose())
    metrics = {metric.name: float(metric.value) for metric in tape.finish("rollout_routes")}
    destroy_mesh()
    return metrics


def with_generated(run: Run, generated_tokens: dict[int, Tensor]) -> Run:
    """Return the run with the samples replaced by what was generated, and its layouts shortened to that."""
    layouts = [
        MicrobatchLayout(
            tuple(
                tuple(
                    SampleSpan(span.sample, len(generated_tokens[span.sample]), span.num_positions)
                    if span.sample >= 0
                    else span
                    for span in row
                )
                for row in layout.rows
            ),
            layout.row_length,
            layout.packed,
        )
        for layout in run.layouts
    ]
    for microbatch, names_Bs in zip(run.microbatches, run.names, strict=True):
        for place, name in enumerate(names_Bs[0].tolist()):
            if name >= 0 and name % IDS < len(generated_tokens[name // IDS]):
                microbatch.tokens_Bs[0, place] = generated_tokens[name // IDS][name % IDS]
    return Run(run.state, run.cache, run.version, layouts, run.microbatches, run.names)


WORLD = 4
MESHES = {
    **{name: BY_NAME[name] for name in ("tp2-dp2", "cp2-dp2", "tp2-pp2-vpp2")},
    "pp2-dp2": MeshConfig(pp=2, dp=2),
    "pp2-layout-dp2": MeshConfig(pp=2, dp=2, pp_layout=(4, 0)),
}


@pytest.mark.full
def test_rollouts_of_other_replicas_train_as_on_one_rank() -> None:
    """R3 sends a rank only its positions and layers, a byte for each expert; nothing is broadcast.

    Tokens that the engine left out are routed live and all others are imposed, as an oracle does without the tape.
    """
    alone = one_rank("qwen3_moe")
    reference = alone.outcomes["packed"]
    ranks = run_ranks(
        trained_on_rollouts, WORLD, list(MESHES.values()), MODELS["qwen3_moe"], alone.weights, reference.recorded
    )
    samples = range(len(LENGTHS))
    names = {n: {n * IDS + t for t in positions_left_out(n)} for n in samples}
    left_out = frozenset[int]().union(*names.values())
    model, weights = MODELS["qwen3_moe"], alone.weights
    ((by_hand,),) = run_ranks(replayed_by_hand, 1, model, weights, ("packed",), left_out)
    oracle = together([by_hand | {"metrics": {}, "error": "", "accounts": []}])
    assert oracle.losses != pytest.approx(reference.losses, rel=1e-5)
    num_repeated, num_compared = repeated_by_hand(reference.recorded, MODELS["qwen3_moe"].vocab_size)
    assert num_repeated >= 5
    for index, mesh in enumerate(MESHES.values()):
        found = [rank[index] for rank in ranks]
        assert_same_training(together(found), reference)
        with_gaps = together([rank["left_out"] for rank in found])
        assert with_gaps.errors == [""] * WORLD
        assert_same_training(with_gaps, oracle)
        assert with_gaps.metrics["routes/live_fraction"] == (len(left_out), sum(LENGTHS))
        assert with_gaps.metrics["routes/compared_tokens"][0] == sum(LENGTHS) - len(left_out)
        for rank_outcome in found:
            assert rank_outcome["repeated"] == pytest.approx(num_repeated / num_compared, abs=1e-12)
            expected, sent = rank_outcome["moved"]
            assert sent == expected and (sent > 0 or mesh.dp == 1), (sent, expected)
            assert rank_outcome["cached_bytes"][0] == rank_outcome["cached_bytes"][1]
            assert rank_outcome["other_traffic"] == {}


def repeated_by_hand(recorded: Recorded, vocab_size: int) -> tuple[int, int]:
    """Return the number of tokens with the routes, in all layers, of the token before and another id, and the number of
    tokens with another id than the one before.
    """
    num_repeated = num_compared = 0
    for sample in range(len(LENGTHS)):
        routes = with_rows_repeated(sample, as_rollout(sample, recorded, vocab_size))
        ids, experts = routes.tokens_T.tolist(), routes.experts_TLK.tolist()
        new = [n for n in range(1, len(ids)) if ids[n] != ids[n - 1]]
        num_repeated += sum(experts[n] == experts[n - 1] for n in new)
        num_compared += len(new)
    return num_repeated, num_compared


@pytest.mark.full
def test_routes_replay_in_other_rows_and_under_other_meshes() -> None:
    alone = one_rank("qwen3_moe")
    reference = alone.outcomes["packed"]
    ranks = run_ranks(laid_out_otherwise, WORLD, list(MESHES.values()), MODELS["qwen3_moe"], alone.weights)
    for index in range(len(MESHES)):
        found = [rank[index] for rank in ranks]
        for replay in range(1 + bool(index)):
            assert_same_training(together([rank["outcome"][replay] for rank in found]), reference)
        messages = {rank["error"] for rank in found}
        assert len(messages) == 1
        assert "this rank has other positions of it" in min(messages) or "there are no routes" in min(messages)


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(damaged_on_one_rank, 2, MODELS["qwen3_moe"])
    assert first == second
    flipped, missing = first
    assert "rank 1: layers [1], sample 6 of version 3: the experts that the routers used are not" in flipped
    assert "rank 1: sample 7 of version 3, layers [0, 1, 2, 3]: there are no routes" in missing


@pytest.mark.matrix("minimax_m2-shallow")
@pytest.mark.parametrize(
    "model",
    [
        *("qwen3_moe", "deepseek_v3", "glm_moe_dsa", "qwen3_next"),
        *("deepseek_v2-shallow", "deepseek_v32-shallow", "dots1-shallow", "glm4_moe_lite-shallow"),
        *("minimax_m2-shallow", "qwen3_5_moe_text-shallow", "solar_open-shallow"),
    ],
)
def test_the_native_engines_routes_are_the_training_passes(model: str) -> None:
    """With equal weights R3 changes next to nothing, whichever replica generated."""
    names = ["tp2-dp2", "cp2-dp2", *(() if model.endswith("shallow") else ("pp2-dp2",))]
    meshes = [MESHES[name] for name in names]
    work = (meshes, MODELS[model], one_rank(model).weights)
    ranks = run_ranks(trained_on_the_engines, WORLD, *work)
    for metrics in (metrics for rank in ranks for metrics in rank):
        assert metrics["rollout_routes/compared_tokens"] == sum(min(n, 15) for n in LENGTHS)
        assert metrics["rollout_routes/changed_fraction"] <= 2


DISAGREEING = "qwen3_moe"
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


def disagreement_on_rank(
    mesh: MeshConfig, weights: Tensors, saved: Mapping[int, SavedRoutes]
) -> tuple[dict[int, tuple[int, int]], list[str], tuple[float, float], torch.Tensor]:
    case = Case(model=DISAGREEING, mesh=mesh, layouts=("packed",), replay=ReplayConfig(kind="r3"))
    (run,) = opened(case, MODELS[DISAGREEING])
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
    limit = DisagreementLimit(case.replay, MODELS[DISAGREEING].moe.top_k, [])
    problems = [*limit.problems_of_samples(many).values()]
    sums = (sum(totals.disjoint_L), sum(totals.current_L))
    return by_sample, problems, sums, totals.expert_choices_2LE


@pytest.mark.matrix("pp2-vpp2")
@pytest.mark.parametrize("mesh", ["1", "tp2-ep2", "cp2", "pp2-vpp2", "ep2"])
def test_a_strangers_routes_are_counted_for_its_sample_on_every_rank_that_has_a_part(mesh: str) -> None:
    """Against sets of experts, counted one by one."""
    reference = one_rank(DISAGREEING)
    saved = reference.saved["packed"]
    expected = {
        n: (
            sum(
                not set(mine_K) & set(given_K)
                for mine_LK, given_LK in zip(saved[n].codes_nlK.tolist()[first:], given.tolist()[first:], strict=True)
                for mine_K, given_K in zip(mine_LK, given_LK, strict=True)
            ),
            (LENGTHS[n] - first) * MODELS[DISAGREEING].num_layers,
        )
        for n, given in engine_routes(saved).items()
        for first in [FIRST_CURRENT.get(n, 0)]
    }
    assert [n for n, (disjoint, _) in expected.items() if disjoint] == [STRANGER]
    choices_2LE = torch.zeros(2, MODELS[DISAGREEING].num_layers, MODELS[DISAGREEING].moe.num_experts)
    for n, given in engine_routes(saved).items():
        for token in range(FIRST_CURRENT.get(n, 0), LENGTHS[n]):
            for layer, mine_K in enumerate(saved[n].codes_nlK[token].tolist()):
                for expert in mine_K:
                    choices_2LE[0, layer, expert] += 1
                    choices_2LE[1, layer, expert] += expert not in given[token, layer].tolist()
    ranks = run_ranks(disagreement_on_rank, BY_NAME[mesh].smallest_world, BY_NAME[mesh], reference.weights, saved)
    assert {n: counts for counted, *_ in ranks for n, counts in counted.items()} == expected
    for counted, problems, totals, found_2LE in ranks:
        assert torch.equal(found_2LE, choices_2LE.double())
        assert totals == tuple(map(sum, zip(*expected.values(), strict=True)))
        assert counted == {n: expected[n] for n in counted}
        assert [problem.split(":")[0] for problem in problems] == [f"sample {STRANGER}"] * (STRANGER in counted)
