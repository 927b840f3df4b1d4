"""A conformance kit for routing replay: does an engine or trainer record and impose routes correctly?

The kit needs a single function of the program under test, which runs passes over a fixed batch on a named mesh
(`RunPasses`). `conformance` uses it to make a table of

- formats: recorded routes have K different experts, in range, for each token and layer, and no stale rows;
- meshes: every mesh records the same routes as the first mesh; imposing them on the weights that recorded them changes
  nothing; imposing them on other weights gives the first mesh's logprobs and gradients, including the routers';
- damage: routes that no router could have chosen are refused, routes of other tokens or layers are imposed as given or
  refused, and the order of a token's experts does not matter;
- faults: variants of the program with a deliberate fault end in an error, or change no number.

docs/replay.md has an example, and tests/parallel/test_conformance.py runs the kit on this package.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Routes = tuple[Tensor, ...]
"""Expert ids of each sample, integers `[T, L, K]`; L counts the layers that have a router."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedModel:
    """Dimensions of the model under test."""

    num_layers: int
    num_experts: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPass:
    """A pass over the whole batch, requested from the program."""

    kind: Literal["record", "impose", "live"]
    weights: Literal["old", "new"]
    """`old`: some weights; `new`: different weights, with which many tokens would choose other experts."""
    routes: Routes | None = None
    """Routes to impose."""
    backward: bool = False
    """Whether to compute gradients, with recomputation if the program supports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """Result of a pass, gathered from all ranks."""

    logprobs: Routes = ()
    """Logprobs of each sample, float `[T]`, or another number per token that depends on every layer."""
    routes: Routes = ()
    """Routes from a recording pass."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """Gradients of whole (unsharded) parameters, by a name that does not depend on the mesh."""
    error: str | None = None
    """Message of the error that ended the pass, on every rank; None if it succeeded. Later passes run regardless."""


RunPasses = Callable[[str, Sequence[ReplayPass]], Sequence[ReplayResult]]
"""Runs passes in order on the mesh of this name, always over the same samples: at least two samples of different
lengths, and two of equal length to test their exchange."""
Verdict = Literal["ok", "refused", "harmless", "FAILED"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    group: str
    case: str
    mesh: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Conformance:
    """Result of `conformance`."""

    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[Row, ...]:
        """Rows of failed checks."""
        return tuple(row for row in self.rows if row.verdict == "FAILED")

    def table(self) -> str:
        """Return the rows as a Markdown table."""
        lines = ["| group | case | mesh | verdict | detail |", "|---|---|---|---|---|"]
        lines += [f"| {r.group} | {r.case} | {r.mesh} | {r.verdict} | {r.detail} |" for r in self.rows]
        return "\n".join(lines)


def conformance(
    run: RunPasses,
    model: RoutedModel,
    meshes: Sequence[str],
    *,
    imposes: bool = True,
    faults: Mapping[str, RunPasses] | None = None,
    tolerance: float = 1e-6,
    gradient_tolerance: float = 1e-5,
    max_changed: float = 0.01,
    is_router: Callable[[str], bool] = lambda name: "router" in name,
) -> Conformance:
    """Run the kit, which starts each mesh once and the first, usually one rank, twice.

    `imposes`: the program can impose routes. `faults`: faulty variants, run on the last mesh. `tolerance` and
    `gradient_tolerance`: largest relative differences that are rounding. `max_changed`: largest fraction of experts in
    which meshes may differ. `is_router`: whether a parameter's name is a router's.
    """
    (first,) = run(meshes[0], [ReplayPass(kind="record", weights="old")])
    problems = [first.error] if first.error else list(format_problems(first.routes, model))
    rows = [Row("formats", "recorded routes", meshes[0], "FAILED", problem) for problem in problems]
    if problems:
        return Conformance(tuple(rows))
    shapes = f"{len(first.routes)} samples, {sum(map(len, first.routes))} tokens, {first.routes[0].dtype}"
    rows.append(Row("formats", "recorded routes", meshes[0], "ok", shapes))
    damages = damaged(first.routes, model)
    passes = [ReplayPass(kind="record", weights="old")]
    if imposes:
        passes += [
            ReplayPass(kind="impose", weights="old", routes=first.routes),
            ReplayPass(kind="impose", weights="new", routes=first.routes, backward=True),
            ReplayPass(kind="live", weights="new", backward=True),
            *(ReplayPass(kind="impose", weights="old", routes=damage.routes) for damage in damages),
        ]
    reference: Sequence[ReplayResult] = ()
    for mesh in meshes:
        results = run(mesh, passes)
        assert len(results) == len(passes), f"{mesh}: {len(passes)} passes gave {len(results)} results"
        reference = reference or results
        rows += _recorded(mesh, first.routes, results[0], model, max_changed)
        if imposes:
            rows += _imposed(mesh, results, reference, tolerance, gradient_tolerance, is_router)
            rows += _damaged(mesh, damages, results[1], results[4:], reference[4:], tolerance)
    for name, faulty in (faults or {}).items():
        wanted = results[2:3] if imposes else results[:1]
        found = faulty(meshes[-1], passes[2:3] if imposes else passes[:1])
        rows.append(_fault(name, meshes[-1], found, wanted, tolerance, gradient_tolerance))
    return Conformance(tuple(rows))


def format_problems(routes: Routes, model: RoutedModel) -> Iterator[str]:
    """Yield a sentence for each sign, found without further passes, that routes do not come from a router."""
    for index, experts_TLK in enumerate(routes):
        where, shape = f"sample {index}", tuple(experts_TLK.shape)
        if len(shape) != 3 or shape[1:] != (model.num_layers, model.top_k):
            yield f"{where} has routes of shape {list(shape)}, not [T, {model.num_layers}, {model.top_k}]"
            continue
        dtype = experts_TLK.dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            yield f"{where} has routes of {dtype}, which are no indices"
            continue
        if torch.iinfo(dtype).max < model.num_experts - 1:
            yield f"{where} has routes of {dtype}, in which {model.num_experts} experts wrap around"
            continue
        experts_TLK = experts_TLK.long()
        is_out_TL = ((experts_TLK < 0) | (experts_TLK >= model.num_experts)).any(-1)
        is_twice_TL = (experts_TLK.sort(-1).values.diff(dim=-1) == 0).any(-1)
        for problem, is_wrong_TL in (("is out of range", is_out_TL), ("appears twice", is_twice_TL)):
            if is_wrong_TL.any():
                token, layer = is_wrong_TL.nonzero()[0].tolist()
                chosen = experts_TLK[token, layer].tolist()
                yield f"{where}, token {token}, layer {layer}: an expert of {chosen} {problem}"
                break
        else:
            if len(experts_TLK) > 2 and (experts_TLK == experts_TLK[:1]).all():
                yield f"{where}: all {len(experts_TLK)} tokens have the same routes, as if one row were stale"


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Routes that differ from the recorded routes."""

    name: str
    routes: Routes
    kind: Literal["impossible", "foreign", "reordered"]
    """`impossible`: no router could have chosen them; `foreign`: from other tokens, layers or samples; `reordered`: the
    same experts in another order."""


def damaged(routes: Routes, model: RoutedModel) -> list[Damage]:
    """Return damaged copies of recorded routes."""

    def each(change: Callable[[Tensor], Tensor]) -> Routes:
        return tuple(change(experts_TLK.long().clone()) for experts_TLK in routes)

    def one_expert(expert: int) -> Routes:
        changed = each(lambda experts_TLK: experts_TLK)
        changed[-1][-1, -1, 0] = expert
        return changed

    def doubled(experts_TLK: Tensor) -> Tensor:
        experts_TLK[..., -1] = experts_TLK[..., 0]
        return experts_TLK

    damages = [
        Damage(name="an expert out of range", kind="impossible", routes=one_expert(model.num_experts)),
        Damage(name="a negative expert", kind="impossible", routes=one_expert(-1)),
        Damage(name="one token short", kind="impossible", routes=each(lambda x: x[:-1])),
        Damage(name="one layer short", kind="impossible", routes=each(lambda x: x[:, :-1])),
        Damage(name="shifted by one token", kind="foreign", routes=each(lambda x: x.roll(1, 0))),
        Damage(name="every expert's neighbour", kind="foreign", routes=each(lambda x: (x + 1) % model.num_experts)),
        Damage(name="one row for all tokens", kind="foreign", routes=each(lambda x: x[:1].expand_as(x))),
    ]
    if model.num_layers > 1:
        damages += [
            Damage(name="layers in reverse", kind="foreign", routes=each(lambda x: x.flip(1))),
            Damage(name="layer 0 for every layer", kind="foreign", routes=each(lambda x: x[:, :1].expand_as(x))),
        ]
    if model.top_k > 1:
        damages += [
            Damage(name="an expert twice", kind="impossible", routes=each(doubled)),
            Damage(name="experts in another order", kind="reordered", routes=each(lambda x: x.flip(-1))),
        ]
    pairs = ((i, j) for j in range(len(routes)) for i in range(j) if len(routes[i]) == len(routes[j]))
    if pair := next(pairs, None):
        exchanged = list(each(lambda x: x))
        exchanged[pair[0]], exchanged[pair[1]] = exchanged[pair[1]], exchanged[pair[0]]
        damages.append(Damage(name="routes of another sample of one length", kind="foreign", routes=tuple(exchanged)))
    return damages


def _recorded(mesh: str, routes: Routes, result: ReplayResult, model: RoutedModel, max_changed: float) -> Iterator[Row]:
    case = ("meshes", "record: the first mesh's routes", mesh)
    problems = [result.error] if result.error else list(format_problems(result.routes, model))
    if not problems and [len(x) for x in routes] != [len(x) for x in result.routes]:
        problems = ["the samples have other lengths"]
    if problems:
        yield Row(*case, "FAILED", "; ".join(problems))
        return
    changed, count = 0, 0
    for first_TLK, second_TLK in zip(routes, result.routes, strict=True):
        is_same_TLKK = first_TLK.long()[..., :, None] == second_TLK.long()[..., None, :]
        changed += int((~is_same_TLKK.any(-1)).sum())
        count += first_TLK.numel()
    share = changed / count
    yield Row(*case, "ok" if share <= max_changed else "FAILED", f"{share:.2%} of experts differ")


def _imposed(
    mesh: str,
    results: Sequence[ReplayResult],
    reference: Sequence[ReplayResult],
    tolerance: float,
    gradient_tolerance: float,
    is_router: Callable[[str], bool],
) -> Iterator[Row]:
    recorded, same, new, live = results[:4]
    for case, result in (("impose: the same weights", same), ("impose: other weights", new)):
        if result.error is not None:
            yield Row("meshes", case, mesh, "FAILED", result.error)
    if same.error is None and recorded.error is None:
        effect = largest_change(same.logprobs, recorded.logprobs)
        yield _bounded("impose: the same weights change nothing", mesh, effect, tolerance)
    if new.error is not None or live.error is not None:
        return
    effect = largest_change(new.logprobs, reference[2].logprobs)
    yield _bounded("impose: other weights give the first mesh's logprobs", mesh, effect, tolerance)
    effect = gradient_change(new.gradients, reference[2].gradients)
    yield _bounded("impose: other weights give the first mesh's gradients", mesh, effect, gradient_tolerance)
    moved = max(largest_change(new.logprobs, live.logprobs), gradient_change(new.gradients, live.gradients))
    detail = f"{moved:.1e} away; if it is 0, either nothing is imposed or the new weights choose the old experts"
    case = "impose: other numbers than live routes"
    yield Row("meshes", case, mesh, "ok" if moved > tolerance else "FAILED", detail)
    learns = [bool(gradient.any()) for name, gradient in new.gradients.items() if is_router(name)]
    detail = f"{sum(learns)} of {len(learns)} routers' parameters have a gradient"
    yield Row("meshes", "impose: routers learn", mesh, "ok" if learns and all(learns) else "FAILED", detail)


def _bounded(case: str, mesh: str, effect: float, tolerance: float) -> Row:
    verdict: Verdict = "ok" if effect <= tolerance else "FAILED"
    return Row("meshes", case, mesh, verdict, f"largest relative difference {effect:.1e}")


def _damaged(
    mesh: str,
    damages: Sequence[Damage],
    right: ReplayResult,
    results: Sequence[ReplayResult],
    reference: Sequence[ReplayResult],
    tolerance: float,
) -> Iterator[Row]:
    for damage, result, first in zip(damages, results, reference, strict=True):
        where = ("damage", damage.name, mesh)
        if result.error is not None:
            verdict: Verdict = "FAILED" if damage.kind == "reordered" else "refused"
            yield Row(*where, verdict, result.error[:120].replace("\n", " ").replace("|", "/"))
            continue
        effect = largest_change(result.logprobs, right.logprobs)
        if damage.kind == "impossible":
            yield Row(*where, "FAILED", f"trained silently, {effect:.1e} away from the right routes")
        elif damage.kind == "reordered":
            yield Row(*where, "harmless" if effect <= tolerance else "FAILED", f"moves logprobs by {effect:.1e}")
        elif effect <= tolerance:
            yield Row(*where, "FAILED", "the logprobs are those of the right routes: these were not imposed")
        elif first.error is None and largest_change(result.logprobs, first.logprobs) > tolerance:
            off = largest_change(result.logprobs, first.logprobs)
            yield Row(*where, "FAILED", f"the logprobs are {off:.1e} away from the first mesh's")
        else:
            yield Row(*where, "ok", f"imposed as given, moves logprobs by {effect:.1e}")


def _fault(
    name: str,
    mesh: str,
    found: Sequence[ReplayResult],
    wanted: Sequence[ReplayResult],
    tolerance: float,
    gradient_tolerance: float,
) -> Row:
    for result, right in zip(found, wanted, strict=True):
        if result.error is not None:
            return Row("faults", name, mesh, "refused", result.error[:120].replace("\n", " ").replace("|", "/"))
        effect = largest_change(result.logprobs, right.logprobs)
        of_gradients = gradient_change(result.gradients, right.gradients)
        if effect > tolerance or of_gradients > gradient_tolerance:
            moved = f"silent: logprobs move by {effect:.1e}, gradients by {of_gradients:.1e}"
            return Row("faults", name, mesh, "FAILED", moved)
    return Row("faults", name, mesh, "harmless", "no number changes")


def largest_change(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the wanted number, or 1e-2 if larger; inf for NaN, other shapes."""
    if [tuple(x.shape) for x in found] != [tuple(x.shape) for x in wanted]:
        return float("inf")
    changes = [
        ((a.double() - b.double()).abs() / b.double().abs().clamp_min(1e-2)).nan_to_num(torch.inf).amax()
        for a, b in zip(found, wanted, strict=True)
        if b.numel()
    ]
    return float(max(changes, default=0.0))


def gradient_change(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest norm of a gradient's difference, relative to its own; inf if one is missing."""
    if found.keys() != wanted.keys():
        return float("inf")
    norms = {name: float(gradient.double().norm()) for name, gradient in wanted.items()}
    floor = 1e-6 * max(norms.values(), default=0.0)
    changes = [
        float((found[name].double() - gradient.double()).norm()) / max(norms[name], floor, 1e-30)
        for name, gradient in wanted.items()
    ]
    return max((x if x == x else float("inf") for x in changes), default=0.0)
