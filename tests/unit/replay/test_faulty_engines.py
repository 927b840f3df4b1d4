"""Engines whose routes are wrong in ways that engines have been: what each of them is met by."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.metrics.metrics import reduced
from mcore_rl.replay.disagreement import DisagreementLimit
from mcore_rl.replay.from_rollouts import RolloutRoutes, cache_rollout_routes
from mcore_rl.rl.engines.server_api import ServerError, pick_layers
from tests.parallel import replaying
from tests.parallel.replaying import Case, Run, opened, sample_tokens, tiny

MODEL = tiny("qwen3_moe")
NUM_EXPERTS, TOP_K = MODEL.moe.num_experts, MODEL.moe.top_k
LENGTHS = tuple(48 + 7 * n % 17 for n in range(20))
"""Tokens of each completion with its prompt, which is its first third."""
ROUNDING = 0.05
"""Noise in the engine's routers, of their weights' deviation: 3 % of the choices differ."""
DOCS = Path(__file__).parents[3] / "docs/replay.md"

Routes = dict[int, Tensor]
Fault = Callable[[Routes], Routes]


def of_each(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda routes: {n: change(one) for n, one in routes.items()}


def of_one_in(count: int, fault: Fault) -> Fault:
    return lambda routes: routes | {n: one for n, one in fault(routes).items() if n % count == 0}


def random_like(one: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(one))
    return torch.rand(*one.shape[:2], NUM_EXPERTS, generator=generator).topk(TOP_K).indices


def another_requests(routes: Routes) -> Routes:
    """Routes of the completion after the next, repeated where it is shorter."""
    others = [routes[(n + 2) % len(routes)] for n in range(len(routes))]
    return {n: torch.cat([others[n], others[n]])[: len(one)] for n, one in routes.items()}


def two_exchanged(routes: Routes) -> Routes:
    """Two completions of one length."""
    first, second = 0, LENGTHS.index(LENGTHS[0], 1)
    return routes | {first: routes[second], second: routes[first]}


def with_rows(rows: Callable[[int], slice], change: Callable[[Tensor], Tensor]) -> Fault:
    """Change some rows of each completion; `rows` is given its number of tokens."""

    def changed(one: Tensor) -> Tensor:
        other = one.clone()
        other[rows(len(one))] = change(one)[rows(len(one))]
        return other

    return of_each(changed)


def with_layer(layer: int, change: Callable[[Tensor], Tensor]) -> Fault:
    return of_each(lambda one: torch.cat([one[:, :layer], change(one)[:, layer : layer + 1], one[:, layer + 1 :]], 1))


def relabelled(*order: int) -> Fault:
    return of_each(lambda one: torch.tensor(order)[one])


def prompt(num_tokens: int) -> slice:
    return slice(num_tokens // 3)


def last_of_prompt(num_tokens: int) -> slice:
    return slice(num_tokens // 3 - 1, num_tokens // 3)


ONE_STALE_ROW = with_rows(prompt, lambda one: one[len(one) // 3].expand_as(one))
FORM, MISSING = "refused by its form", "missing"
LAYER, SAMPLE, EXPERTS = "limit of the layers", "left out", "experts that never agree"
MEASURED, HARMLESS = "measured", "harmless"
FAULTS: dict[str, tuple[Fault, str]] = {
    "rows one token late": (of_each(lambda one: one.roll(1, 0)), LAYER),
    "rows one token early": (of_each(lambda one: one.roll(-1, 0)), LAYER),
    "cut at the head, the last row repeated": (
        of_each(lambda one: torch.cat([one[3:], one[-1:].expand(3, -1, -1)])),
        LAYER,
    ),
    "cut at the head": (of_each(lambda one: one[3:]), FORM),
    "cut at the tail": (of_each(lambda one: one[:-1]), FORM),
    "-1 for the prompt": (with_rows(prompt, lambda one: torch.full_like(one, -1)), MISSING),
    "zeros for the prompt": (with_rows(prompt, torch.zeros_like), FORM),
    "one row for all tokens": (of_each(lambda one: one[:1].expand_as(one)), LAYER),
    "one row for the prompt": (ONE_STALE_ROW, LAYER),
    "one row for the prompt in one completion of ten": (of_one_in(10, ONE_STALE_ROW), SAMPLE),
    "the row before for the last token of the prompt": (
        with_rows(last_of_prompt, lambda one: one.roll(1, 0)),
        MEASURED,
    ),
    "another layer's, in order": (of_each(lambda one: one.roll(1, 1)), LAYER),
    "two layers exchanged": (of_each(lambda one: one[:, [0, 2, 1, 3]]), LAYER),
    "layers in reverse": (of_each(lambda one: one.flip(1)), LAYER),
    "the first layer's for all": (of_each(lambda one: one[:, :1].expand_as(one)), LAYER),
    "a layer too few": (of_each(lambda one: one[:, 1:]), FORM),
    "layers and experts transposed": (of_each(lambda one: one.transpose(1, 2)), FORM),
    "tokens and layers transposed": (of_each(lambda one: one.transpose(0, 1)), FORM),
    "ids one too large": (of_each(lambda one: one + 1), FORM),
    "ids one too large, the last is 0": (of_each(lambda one: (one + 1) % NUM_EXPERTS), LAYER),
    "ids in another order": (relabelled(3, 6, 0, 7, 1, 4, 2, 5), LAYER),
    "ids of two experts exchanged": (relabelled(0, 1, 2, 5, 4, 3, 6, 7), EXPERTS),
    "ids as floats": (of_each(lambda one: one.float()), FORM),
    "an expert twice": (with_rows(last_of_prompt, lambda one: one[:, :, :1].expand_as(one)), FORM),
    "an expert too many": (of_each(lambda one: torch.cat([one, one[:, :, :1]], 2)), FORM),
    "an expert too few": (of_each(lambda one: one[:, :, :1]), FORM),
    "experts sorted": (of_each(lambda one: one.sort(-1).values), HARMLESS),
    "experts in reverse": (of_each(lambda one: one.flip(-1)), HARMLESS),
    "another request's": (another_requests, LAYER),
    "another request's in one completion of ten": (of_one_in(10, another_requests), SAMPLE),
    "another request's in one completion of twenty": (of_one_in(20, another_requests), SAMPLE),
    "two completions exchanged": (two_exchanged, SAMPLE),
    "random": (of_each(random_like), LAYER),
    "random in one completion of ten": (of_one_in(10, of_each(random_like)), SAMPLE),
    "random in one completion of twenty": (of_one_in(20, of_each(random_like)), SAMPLE),
    "random at one token of ten": (with_rows(lambda _: slice(0, None, 10), random_like), LAYER),
    "random in one layer": (with_layer(2, random_like), LAYER),
}
"""Fault and what it is met by, in the first pass of a run."""


@dataclass(frozen=True)
class Engine:
    """A trainer, and routes of an engine that rounds otherwise."""

    run: Run
    routes: Routes
    losses: dict[int, float]
    changed: float
    disjoint: float


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "LENGTHS", LENGTHS)
        patch.setattr(replaying, "ROW", 64)
        case = Case(model="", mesh=MeshConfig(), layouts=("packed",), replay=ReplayConfig(kind="r3"))
        (run,) = opened(case, MODEL)
        routes = routes_with_noise(run, ROUNDING)
        problem, losses, metrics = trained(run, routes, routes)
        assert problem == ""
        changed, disjoint = (metrics[f"rollout_routes/{kind}_fraction"] for kind in ("changed", "disjoint"))
        assert 0.01 < changed < 0.05 and disjoint < 0.003
        yield Engine(run, routes, losses, changed, disjoint)
        for _, router in (pair for chunk in run.state.chunks for pair in replayed_routers(chunk)):
            router.router_replay = None
        destroy_mesh()


def routes_with_noise(run: Run, noise: float) -> Routes:
    """The live routes under routers with some noise, which is taken away again."""
    weights = [router.weight for chunk in run.state.chunks for _, router in replayed_routers(chunk)]
    generator, before = torch.Generator().manual_seed(1), [weight.detach().clone() for weight in weights]
    run.cache.drop(run.version)
    with torch.no_grad():
        for weight in weights:
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
        with run.tape() as tape:
            run.evaluate(tape.record())
            tape.finish()
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
    return {n: saved.codes_nlK.long() for n, saved in run.saved().items()}


def trained(run: Run, routes: Routes, honest: Routes) -> tuple[str, dict[int, float], dict[str, float]]:
    """Return what an old-policy pass under the routes is met by, if anything, its losses and metrics; `honest` routes
    stand for those of completions that are left out.
    """
    tokens = {n: sample_tokens(n, MODEL.vocab_size)[:length] for n, length in enumerate(LENGTHS)}
    given = {n: RolloutRoutes(tokens[n], one) for n, one in routes.items()}
    try:
        before = cache_rollout_routes(run.cache, run.version, given, run.layouts, run.state.mesh)
    except RoutingError:
        return FORM, {}, {}
    try:
        with run.tape() as tape:
            losses = run.evaluate(tape.impose())
            metrics = reduced([*before, *tape.finish("rollout_routes")])
    except RoutingError as error:
        assert "tokens have no routes" in str(error)
        return MISSING, {}, {}
    assert tape.totals is not None
    replay = ReplayConfig(kind="r3")
    limit = DisagreementLimit(replay, TOP_K, [])
    # As PolicyRoutes does: few completions are left out, and then the others are judged by their layers.
    refused = limit.problems_of_samples(tape.disjoint_by_sample)
    if 0 < len(refused) <= replay.max_refused_fraction * len(routes):
        problem, *_ = trained(run, routes | {n: honest[n] for n in refused}, honest)
        return problem or SAMPLE, losses, metrics
    if problem := limit.problem(tape.totals):
        return LAYER if "have no expert in common" in problem else EXPERTS, losses, metrics
    assert not refused
    return "", losses, metrics


def is_refused_of_a_server(routes: Routes) -> bool:
    """Whether some completion would be generated again, before anything else sees its routes."""
    try:
        for n, one in routes.items():
            pick_layers("server", one.numpy().astype(np.int32), MODEL, num_tokens=LENGTHS[n])
    except ServerError:
        return True
    return False


@pytest.mark.matrix(
    "rows one token late", "one row for the prompt in one completion of ten", "random in one layer", "layers in reverse"
)
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_an_engine_is_met(name: str, engine: Engine) -> None:
    """Those that are met by nothing change no number, or few, which are measured."""
    fault, wanted = FAULTS[name]
    routes = fault(engine.routes)
    # The dtype of a server's routes is looked at where its answer is read (test_server_apis.py).
    if name != "ids as floats":
        assert is_refused_of_a_server(routes) == (wanted in (FORM, MISSING))
    problem, losses, metrics = trained(engine.run, routes, engine.routes)
    if wanted == HARMLESS:
        assert problem == "" and losses == pytest.approx(engine.losses, abs=1e-6)
        assert metrics["rollout_routes/changed_fraction"] == engine.changed
    elif wanted == MEASURED:
        assert problem == ""
        assert metrics["rollout_routes/repeated_fraction"] > 0.9 / max(LENGTHS)
        assert metrics["rollout_routes/disjoint_fraction"] > engine.disjoint + 0.4 / max(LENGTHS)
    else:
        assert problem == wanted


@pytest.mark.full
def test_routes_of_older_weights_that_are_said_to_be_present_are_measured(engine: Engine) -> None:
    """An update moves single experts, as rounding does: here 12 % of the choices."""
    older = routes_with_noise(engine.run, 4 * ROUNDING)
    problem, _, metrics = trained(engine.run, older, older)
    assert problem == ""
    assert metrics["rollout_routes/changed_fraction"] > 3 * engine.changed


def test_the_table_of_the_docs_is_this_one() -> None:
    rows = {f"| {name} | {met} |" for name, (_, met) in FAULTS.items()}
    assert rows <= {line.strip() for line in DOCS.read_text().splitlines()}
