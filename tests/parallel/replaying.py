"""Helpers that record, impose and compare routes on any mesh; one world of ranks runs many cases."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.schedule import HeadOutput, free_routing, run_pass
from mcore_rl.model.global_tensors import copy_in
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.exchange import OfferedRoutes
from mcore_rl.replay.layouts import MicrobatchLayout, SampleSpan
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.train.state import TrainState
from tests.parallel.parity import Tensors, config_of, whole_gradients
from tests.parallel.plain import set_up_plain
from tests.tiny_models import TINY

LENGTHS = (13, 8, 16, 5, 11, 16, 3, 10)
"""Number of tokens of each sample; the last position of each is not trained on."""
ROW = 16
"""Positions of a padded row; a packed one has as many for each of its samples."""
IDS = 1000
VERSION = 3
Sabotage = Callable[[TrainState], None]

NO_ROUTER_LOSS = {"balance": "none", "aux_loss_coeff": 0.0, "z_loss_coeff": 0.0}


def tiny(family: str, num_layers: int = 4, mtp: int = 0, **moe: Any) -> ModelConfig:
    """Return a family's smallest model without the routers' losses, which see padding."""
    model = TINY[family]
    experts = model.moe.model_copy(update=NO_ROUTER_LOSS | moe)
    return model.model_copy(update={"moe": experts, "num_layers": num_layers, "mtp_layers": mtp})


class SavedRoutes(NamedTuple):
    """Routes of one sample that outlive their cache: codes `[n, l, K]` of these positions and layers."""

    num_tokens: int
    layers: tuple[int, ...]
    position_n: Tensor
    checksum_l: Tensor
    codes_nlK: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one mesh, recorded and replayed."""

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
        """Platform with this precision and recomputation."""
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
        """Return the number of trained tokens."""
        return microbatch.loss_mask_Bs.sum().int()

    def __call__(self, microbatch: LocalMicrobatch, output: Tensor) -> HeadOutput:
        """Return loss and count of one microbatch."""
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
            MicrobatchLayout(
                tuple((SampleSpan(n, LENGTHS[n], ROW),) for n in samples), row_length=ROW, packed=False
            )
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
        """Return a new tape for one pass."""
        return RoutingTape(self.state.chunks, self.state.mesh, self.layouts, self.cache, self.version)

    def losses(self, kept: Sequence[dict[str, Tensor]]) -> dict[int, float]:
        """Return the loss of each trained token on this rank, by name."""
        found: dict[int, float] = {}
        for names_Bs, outputs in zip(self.names, kept, strict=False):
            chosen = outputs["mask"] > 0
            found |= dict(zip(names_Bs[chosen].tolist(), outputs["losses"][chosen].tolist(), strict=True))
        return found

    def evaluate(self, routing: Any = free_routing) -> dict[int, float]:
        """Return the losses of a pass without gradients."""
        for chunk in self.state.chunks:
            chunk.eval()
        with torch.no_grad():
            kept = run_pass(self.state.chunks, self.microbatches, LossHead(), backward=False, routing=routing)
        for chunk in self.state.chunks:
            chunk.train()
        return self.losses(kept)

    def gradients(self, routing: Any = free_routing) -> tuple[dict[int, float], list[Any]]:
        """Return losses and finished gradients, in the pieces of the weights."""
        for chunk in self.state.chunks:
            chunk.zero_grad_buffer()
        with whole_gradients(self.state) as found:
            kept = run_pass(self.state.chunks, self.microbatches, LossHead(), backward=True, routing=routing)
        return self.losses(kept), [piece for piece in found if not piece[0].endswith("expert_bias")]

    def saved(self) -> dict[int, SavedRoutes]:
        """Return the routes of each sample that this rank has cached."""
        cached = {
            sample: self.cache.sample(self.version, sample) for sample in self.cache.samples(self.version)
        }
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
    """Return saved routes as a cache offers them to other ranks."""
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
    return {
        "losses": losses,
        "gradients": gradients,
        "metrics": metrics,
        "error": error,
        "accounts": accounts,
    }


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
