"""Routes that are recorded, imposed and compared on any mesh, with those of one rank and with an oracle that has no
part of mcore_rl.replay; one world of ranks runs many cases.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.megatron.schedule import HeadOutput, free_routing, run_pass
from mcore_rl.model.build import copy_in
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.replay.cache import MicrobatchLayout, RoutingCache, SampleSpan
from mcore_rl.replay.exchange import OfferedRoutes
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.train.state import TrainState
from tests.parallel.parity import (
    Tensors,
    assembled,
    config_of,
    largest,
    random_weights,
    relative_errors,
    set_up_plain,
    whole_gradients,
)
from tests.ranks import run_ranks
from tests.tiny_models import TINY, without_router_losses

LENGTHS = (13, 8, 16, 5, 11, 16, 3, 10)
"""Number of tokens of each sample; the last position of each is not trained on."""
ROW = 16
"""Positions of a padded row; a packed one has as many for each of its samples."""
IDS = 1000
VERSION = 3
Sabotage = Callable[[TrainState], None]


def tiny(family: str, num_layers: int = 4, mtp: int = 0, **moe: Any) -> ModelConfig:
    """Return a family's smallest model without the routers' losses, which see padding."""
    model = without_router_losses(TINY[family], **moe)
    return model.model_copy(update={"num_layers": num_layers, "mtp_layers": mtp})


class SavedRoutes(NamedTuple):
    """Routes of one sample that outlive their cache: codes `[n, l, K]` of these positions and layers."""

    num_tokens: int
    layers: tuple[int, ...]
    position_n: Tensor
    checksum_l: Tensor
    codes_nlK: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    mesh: MeshConfig
    recompute: str = "none"
    layouts: tuple[str, ...] = ("packed", "padded")
    precision: Literal["fp32", "bf16"] = "fp32"
    sabotage: Sabotage | None = None
    same_weights: bool = True
    """Whether routes are recorded on this mesh too, and imposed on the same weights."""
    replay: ReplayConfig = field(default_factory=lambda: ReplayConfig(kind="r2"))

    @property
    def platform(self) -> PlatformConfig:
        if self.recompute in ("none", "full"):
            return PlatformConfig(layers="torch", precision=self.precision, recompute=self.recompute)  # type: ignore[arg-type]
        modules: Any = (self.recompute,)
        return PlatformConfig(
            layers="torch", precision=self.precision, recompute="selective", recompute_modules=modules
        )


class LossHead:
    """Sum of the trained tokens' losses with uneven weights; returns all losses."""

    wants_losses = True

    def count(self, microbatch: LocalMicrobatch) -> Tensor:
        return microbatch.loss_mask_Bs.sum().int()

    def __call__(self, microbatch: LocalMicrobatch, output: Tensor) -> HeadOutput:
        mask_Bs = microbatch.loss_mask_Bs
        loss = (output.float() * mask_Bs * (1 + microbatch.position_ids_Bs % 3)).sum()
        kept = {"losses": output.detach().float(), "mask": mask_Bs}
        return HeadOutput(loss=loss, count=mask_Bs.sum().int(), outputs=kept)


def sample_tokens(sample: int, vocab_size: int) -> Tensor:
    """Return the token ids of a sample and the token after it."""
    generator = torch.Generator().manual_seed(sample)
    return torch.randint(0, vocab_size, (LENGTHS[sample] + 1,), generator=generator)


def layouts_of(packed: bool, state: TrainState) -> list[MicrobatchLayout]:
    """Return this replica's microbatches, in padded rows of a sample each or in one packed row with gaps.

    They have two samples each, and four on several ranks where two microbatches are enough: without replicas that share
    them, more than two chunks that take turns, and experts with a capacity. Ranks mostly wait for each other, and half
    as many microbatches have half the messages.
    """
    mesh, chunks, moe = state.mesh, state.chunks, state.config.model.moe
    has_few = mesh.dp.size == 1 and mesh.pp.size * len(chunks) <= 2 and moe.capacity_factor is None
    size = 4 if mesh.world.size > 1 and has_few else 2
    share = len(LENGTHS) // mesh.dp.size
    begins = range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share, size)
    mine = [range(begin, begin + size) for begin in begins]
    if not packed:
        return [
            MicrobatchLayout(tuple((SampleSpan(n, LENGTHS[n], ROW),) for n in samples), row_length=ROW, packed=False)
            for samples in mine
        ]
    layouts = []
    for samples in mine:
        spans = [SampleSpan(n, LENGTHS[n], -(-LENGTHS[n] // 4) * 4) for n in samples]
        rest = size * ROW - sum(span.num_positions for span in spans)
        if rest:
            spans.append(SampleSpan(-1, 0, rest))
        layouts.append(MicrobatchLayout((tuple(spans),), row_length=size * ROW, packed=True))
    return layouts


def microbatch_of(layout: MicrobatchLayout, state: TrainState) -> tuple[LocalMicrobatch, Tensor]:
    """Return this rank's part, and the name of each position: sample * IDS + position, -1 for padding."""
    vocab = state.config.model.vocab_size
    columns: dict[str, list[Tensor]] = {"ids": [], "labels": [], "mask": [], "positions": [], "names": []}
    for span in layout.spans:
        count = span.num_tokens if span.sample >= 0 else 0
        rest = span.num_positions - count
        tokens = sample_tokens(span.sample, vocab) if count else torch.zeros(1, dtype=torch.int64)
        mask = torch.ones(count)
        if count:
            mask[-1] = 0.0
        names = span.sample * IDS + torch.arange(count)
        pads = torch.zeros(rest, dtype=torch.int64)
        for name, values in {
            "ids": torch.cat([tokens[:count], pads]),
            "labels": torch.cat([tokens[1 : count + 1], pads]),
            "mask": torch.cat([mask, pads.float()]),
            "positions": torch.arange(span.num_positions),
            "names": torch.cat([names, pads - 1]),
        }.items():
            columns[name].append(values)
    rows = {name: torch.cat(values).view(-1, layout.row_length) for name, values in columns.items()}
    spans = None
    if layout.packed:
        bounds = torch.tensor([0, *(span.num_positions for span in layout.spans)]).cumsum(0).int()
        spans = PackedSpans(cu_seqlens=bounds, max_length=int(bounds.diff().max()))

    def made(ids: Tensor) -> LocalMicrobatch:
        whole = Microbatch(
            tokens_BS=ids,
            labels_BS=rows["labels"],
            loss_mask_BS=rows["mask"],
            position_ids_BS=rows["positions"],
            packed=spans,
        )
        return localize(whole, state.mesh.cp, state.platform.device)

    return made(rows["ids"]), made(rows["names"]).tokens_Bs


@dataclass
class Run:
    """A model on this rank with a cache and one batch."""

    state: TrainState
    cache: RoutingCache
    version: int
    layouts: list[MicrobatchLayout]
    microbatches: list[LocalMicrobatch]
    names: list[Tensor]

    def tape(self) -> RoutingTape:
        return RoutingTape(self.state.chunks, self.state.mesh, self.layouts, self.cache, self.version)

    def losses(self, kept: Sequence[dict[str, Tensor]]) -> dict[int, float]:
        found: dict[int, float] = {}
        for names_Bs, outputs in zip(self.names, kept, strict=False):
            chosen = outputs["mask"] > 0
            found |= dict(zip(names_Bs[chosen].tolist(), outputs["losses"][chosen].tolist(), strict=True))
        return found

    def evaluate(self, routing: Any = free_routing) -> dict[int, float]:
        for chunk in self.state.chunks:
            chunk.eval()
        with torch.no_grad():
            kept = run_pass(self.state.chunks, self.microbatches, LossHead(), backward=False, routing=routing)
        for chunk in self.state.chunks:
            chunk.train()
        return self.losses(kept)

    def gradients(self, routing: Any = free_routing) -> tuple[dict[int, float], list[Any]]:
        for chunk in self.state.chunks:
            chunk.zero_grad_buffer()
        with whole_gradients(self.state) as found:
            kept = run_pass(self.state.chunks, self.microbatches, LossHead(), backward=True, routing=routing)
        return self.losses(kept), [piece for piece in found if not piece[0].endswith("expert_bias")]

    def saved(self) -> dict[int, SavedRoutes]:
        cached = {sample: self.cache.sample(self.version, sample) for sample in self.cache.samples(self.version)}
        return {
            sample: SavedRoutes(
                routes.num_tokens,
                self.cache.layers,
                routes.position_n,
                routes.checksum_l,
                self.cache.codes(routes, torch.arange(len(routes.position_n))),
            )
            for sample, routes in cached.items()
        }

    def load(self, saved: Mapping[int, SavedRoutes]) -> None:
        """Collective over the world: cache what this run needs of all ranks' `saved` routes, and nothing else."""
        held = {sample: as_holding(routes) for sample, routes in saved.items()}
        mesh = self.state.mesh
        self.cache.receive(self.version, held, self.cache.needed_positions(self.layouts, mesh), mesh.world)

    def routes(self) -> dict[int, dict[int, list[Any]]]:
        """Return layer -> token's name -> route codes that this rank has cached."""
        found: dict[int, dict[int, list[Any]]] = {layer: {} for layer in self.cache.layers}
        for sample in self.cache.samples(self.version):
            entry = self.cache.sample(self.version, sample)
            codes_nlK = self.cache.codes(entry, torch.arange(len(entry.position_n)))
            for position, codes_lK in zip(entry.position_n.tolist(), codes_nlK.tolist(), strict=True):
                for layer, codes_K in zip(self.cache.layers, codes_lK, strict=True):
                    found[layer][sample * IDS + position] = codes_K
        return found


def as_holding(routes: SavedRoutes) -> OfferedRoutes:
    return OfferedRoutes(
        num_tokens=routes.num_tokens,
        layers=routes.layers,
        position_n=routes.position_n,
        checksum_l=routes.checksum_l,
        read=lambda row_n: routes.codes_nlK[row_n],
    )


def opened(case: Case, model: ModelConfig) -> list[Run]:
    """Build a new model on this rank, and a batch of each layout; no routes are cached."""
    config = config_of(model, case.mesh, case.platform)
    state = set_up_plain(config)
    cache = RoutingCache(state.chunks, model, case.replay)
    return [batch_of(state, cache, layout == "packed") for layout in case.layouts]


def batch_of(state: TrainState, cache: RoutingCache, packed: bool) -> Run:
    """Return this replica's microbatches; each layout has its own policy version."""
    layouts = layouts_of(packed, state)
    made = [microbatch_of(layout, state) for layout in layouts]
    return Run(state, cache, VERSION + packed, layouts, [m for m, _ in made], [names for _, names in made])


def perturbed(weights: Tensors) -> Tensors:
    """Return other weights, with which many tokens choose other experts."""
    generator = torch.Generator().manual_seed(5)
    changed = {}
    for name, value in sorted(weights.items()):
        noise = torch.randn(value.shape, generator=generator)
        is_router = ".router.weight" in name
        changed[name] = value + (0.03 if is_router else 0.002) * noise if value.dim() > 1 else value
    return changed


def replay(
    case: Case, model: ModelConfig, weights: Tensors, saved: Sequence[dict[int, SavedRoutes]]
) -> list[dict[str, Any]]:
    """Record with `weights` on this rank, replay with them and then with other weights; for each layout.

    A world of one rank returns its routes; every other world is given those in `saved`, one for each layout, and
    imposes them after it has compared them with its own.
    """
    runs = opened(case, model)
    state, mesh = runs[0].state, runs[0].state.mesh
    copy_in(state.chunks, weights)
    results = [replayed_unchanged(run) if case.same_weights else {} for run in runs]
    if mesh.world.size == 1:
        for run, found in zip(runs, results, strict=True):
            found["saved"] = run.saved()
    else:
        for run, routes in zip(runs, saved, strict=True):
            run.load(routes)
    copy_in(state.chunks, perturbed(weights))
    for run, found in zip(runs, results, strict=True):
        found |= replayed(run, case.sabotage)
    destroy_mesh()
    return results


def replayed_unchanged(run: Run) -> dict[str, Any]:
    """Return losses of a pass that records and of one that imposes its routes on the same weights."""
    tape = run.tape()
    free = run.evaluate(tape.record())
    tape.finish()
    recorded = run.routes()
    tape = run.tape()
    same = run.evaluate(tape.impose())
    unchanged = {metric.name: float(metric.value) for metric in tape.finish()}
    return {"free": free, "same": same, "recorded": recorded, "unchanged": unchanged}


def replayed(run: Run, sabotage: Sabotage | None) -> dict[str, Any]:
    """Return losses and gradients under the cached routes, and the message of a RoutingError."""
    tape = run.tape()
    routing = tape.impose()
    if sabotage is not None:
        sabotage(run.state)
    losses, gradients = run.gradients(routing)
    error, metrics = "", {}
    try:
        metrics = {metric.name: (float(metric.value), float(metric.count)) for metric in tape.finish()}
    except RoutingError as problem:
        error = str(problem)
    accounts = [dataclasses.asdict(account) for account in tape.accounts]
    return {"losses": losses, "gradients": gradients, "metrics": metrics, "error": error, "accounts": accounts}


def replay_all(
    cases: Sequence[Case],
    models: dict[str, ModelConfig],
    weights: dict[str, Tensors],
    saved: dict[str, dict[str, dict[int, SavedRoutes]]],
) -> list[list[dict[str, Any]]]:
    """Run the cases one after the other; `saved` has the routes of one rank by model and layout."""
    return [
        replay(
            case,
            models[case.model],
            weights[case.model],
            [saved[case.model][layout] for layout in case.layouts] if saved else [],
        )
        for case in cases
    ]


Choice = dict[int, tuple[list[int], list[bool]]]
"""Token's name -> its top-k experts, and which of them had room."""


def replayed_by_hand(
    model: ModelConfig, weights: Tensors, layouts: tuple[str, ...], left_out: frozenset[int] = frozenset()
) -> list[dict[str, Any]]:
    """On one rank, for each layout: losses and gradients of other weights under the choices, and the drops, that the
    routers made with `weights`; tokens whose names are `left_out` are routed live.
    """
    runs = opened(Case(model="", mesh=MeshConfig(), layouts=layouts), model)
    found = []
    for run in runs:
        copy_in(run.state.chunks, weights)
        choices = [
            {name: chosen for name, chosen in choice.items() if name not in left_out} for choice in natural_choices(run)
        ]
        copy_in(run.state.chunks, perturbed(weights))
        losses, gradients = imposed_by_hand(run, choices)
        dropped = sum(not has_room for choice in choices for _, rooms in choice.values() for has_room in rooms)
        found.append({"losses": losses, "gradients": gradients, "dropped": dropped, "choices": choices})
    destroy_mesh()
    return found


def routers_of(run: Run) -> list[Any]:
    """All routers of the one chunk, in order of their layers."""
    return [router for chunk in run.state.chunks for _, router in replayed_routers(chunk)]


def names_in_router_order(run: Run) -> list[list[int]]:
    """Name of each token as a router sees it: on one rank `[B, S]` is transposed to `[S, B]`; -1 for padding."""
    return [names_BS.t().flatten().tolist() for names_BS in run.names]


def natural_choices(run: Run) -> list[Choice]:
    """The routers' own choices in a free pass, one for each call: microbatch by microbatch, and in each by layer."""
    calls: list[tuple[Tensor, Tensor]] = []

    def read(router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        experts_TK = chosen_by_hand(router, inputs[0].flatten(0, 1).float() @ router.weight.float().t())
        calls.append((experts_TK, output[1].gather(1, experts_TK)))

    hooks = [router.register_forward_hook(read) for router in routers_of(run)]
    run.evaluate()
    for hook in hooks:
        hook.remove()
    num_layers, choices = len(hooks), []
    for index, (experts_TK, has_room_TK) in enumerate(calls):
        names = names_in_router_order(run)[index // num_layers]
        tokens = zip(names, experts_TK.tolist(), has_room_TK.tolist(), strict=True)
        choices.append({name: (experts, rooms) for name, experts, rooms in tokens if name >= 0})
    return choices


def chosen_by_hand(router: Any, logits_TE: Tensor) -> Tensor:
    """The top-k of the logits (Qwen3); or of biased sigmoids in the best groups (DeepSeek-V3), where a group is as good
    as its best experts that fit.
    """
    if router.score_function == "softmax":
        return logits_TE.topk(router.topk).indices
    scores_TE = logits_TE.sigmoid() + router.expert_bias
    groups, chosen = router.config.moe_router_num_groups, router.config.moe_router_group_topk
    scores_TGe = scores_TE.view(len(scores_TE), groups, -1)
    of_group_TG = scores_TGe.topk(router.topk // chosen).values.sum(-1)
    is_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool).scatter(1, of_group_TG.topk(chosen).indices, False)
    return scores_TGe.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1).topk(router.topk).indices


def gates_by_hand(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """The softmax of the chosen logits (Qwen3); or the chosen sigmoids over their sum, scaled (DeepSeek-V3)."""
    chosen_TK = logits_TE.gather(1, experts_TK)
    if router.score_function == "softmax":
        return chosen_TK.softmax(-1)
    scores_TK = chosen_TK.sigmoid()
    return scores_TK / scores_TK.sum(-1, keepdim=True) * router.config.moe_router_topk_scaling_factor


def imposed_by_hand(run: Run, choices: list[Choice]) -> tuple[dict[int, float], list[Any]]:
    """Losses and gradients of a pass in which every router's forward is replaced by the formula.

    A gate without room is zero, and the others keep their size.
    """
    routers, names = routers_of(run), names_in_router_order(run)
    calls = iter(range(len(choices)))

    def imposing(router: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        def forward(hidden_SBD: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
            call = next(calls)
            choice = choices[call]
            logits_TE = hidden_SBD.flatten(0, 1).float() @ router.weight.float().t()
            # Tokens without a choice are routed live, and padding, whose output reaches no token and no loss.
            live = [(experts, [True] * router.topk) for experts in chosen_by_hand(router, logits_TE).tolist()]
            of_call = zip(names[call // len(routers)], live, strict=True)
            rows = [choice.get(name, chosen) for name, chosen in of_call]
            experts_TK, has_room_TK = (torch.tensor(column) for column in zip(*rows, strict=True))
            gates_TK = gates_by_hand(router, logits_TE, experts_TK) * has_room_TK
            gates_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, gates_TK)
            return gates_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, experts_TK, has_room_TK)

        return forward

    for router in routers:
        router.forward = imposing(router)
    result = run.gradients()
    for router in routers:
        del router.forward
    assert next(calls, None) is None, "a router was not called"
    return result


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
        {layout: together([rank[index][place] for rank in ranks]) for place, layout in enumerate(case.layouts)}
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
    assert {layer: {n: sorted(k) for n, k in routes.items()} for layer, routes in outcome.recorded.items()} == {
        layer: {n: sorted(k) for n, k in routes.items()} for layer, routes in reference.recorded.items()
    }


def assert_same_training(outcome: Outcome, reference: Outcome, tolerance: float = 1e-5) -> None:
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-5)
    errors = relative_errors(outcome.gradients, reference.gradients)
    assert max(errors.values()) <= tolerance, f"gradients differ: {largest(errors)}"
