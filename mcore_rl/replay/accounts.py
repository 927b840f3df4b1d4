"""What became of the routes of a pass: how often routers asked, what was changed, and the world's sums of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.replay.router_hooks import Visit


@dataclass(frozen=True, slots=True)
class LayerAccount:
    """Routes of this rank's tokens in one layer, over the pass."""

    layer: int
    expected: int
    """Tokens of all microbatches, without padding."""
    consumed: int
    """That the router took or made in the first forward pass."""
    recomputed: int
    """That it took once more."""

    @property
    def left_over(self) -> int:
        """That no router asked for."""
        return self.expected - self.consumed


@dataclass(slots=True)
class Accounts:
    """How often each layer's router asked in each microbatch of `num_tokens`."""

    layers: tuple[int, ...]
    num_tokens: Sequence[int]
    _visits: list[tuple[tuple[int, ...], int, list[int], list[int]]] = field(default_factory=list)

    def add(self, layers: tuple[int, ...], visit: Visit) -> None:
        """One chunk, with routers of these layers, has seen one microbatch; recomputation is yet to be counted."""
        self._visits.append((layers, visit.index, visit.asked, visit.recomputed))

    def asked(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(layer, microbatch) -> how often its router asked in a forward pass, and in recomputation."""
        counts = {(layer, index): (0, 0) for layer in self.layers for index in range(len(self.num_tokens))}
        for layers, index, asked, recomputed in self._visits:
            for column, layer in enumerate(layers):
                first, again = counts[layer, index]
                counts[layer, index] = (first + asked[column], again + recomputed[column])
        return counts

    def by_layer(self) -> list[LayerAccount]:
        """In order of layers."""
        asked = self.asked()
        accounts = []
        for layer in self.layers:
            tokens = dict(enumerate(self.num_tokens))
            consumed, recomputed = (
                sum(tokens[index] * asked[layer, index][kind] for index in tokens) for kind in (0, 1)
            )
            accounts.append(LayerAccount(layer, sum(self.num_tokens), consumed, recomputed))
        return accounts

    def problems(self, samples: Sequence[Sequence[int]]) -> Iterator[str]:
        """Each router that did not ask exactly once, with the microbatch's samples."""
        for (layer, index), (first, again) in self.asked().items():
            where = f"layer {layer}, microbatch {index} (samples {list(samples[index])})"
            if first == 0:
                yield f"{where}: no router took the routes, which are left over; the chunk calls another router"
            elif first > 1:
                yield f"{where}: routes were taken {first} times in one forward pass"
            elif again > 1:
                yield f"{where}: routes were taken {again} times in recomputation"


class Changes:
    """How far the live choices of this rank's tokens are from the known ones."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.sums_l2 = torch.zeros(num_layers, 2, dtype=torch.float64, device=device)
        """Changed slots, and their gates, of each layer."""

    def add(self, columns: slice, is_changed_Klt: Tensor, gates_ltK: Tensor) -> None:
        """Of one microbatch in one chunk."""
        moved_l = (gates_ltK.permute(2, 0, 1) * is_changed_Klt).sum((0, 2))
        self.sums_l2[columns] += torch.stack([is_changed_Klt.sum((0, 2)), moved_l], 1)


def changed(live_ltK: Tensor, known_ltK: Tensor, is_known_t: Tensor) -> Tensor:
    """bool `[K, l, t]`: live choices that are none of the known ones, of tokens whose routes are known."""
    # K passes over long rows: on a CPU ten times as fast as one over K x K.
    live_Klt, known_Klt = (codes.permute(2, 0, 1).contiguous() for codes in (live_ltK, known_ltK))
    is_kept_Klt = torch.zeros_like(live_Klt, dtype=torch.bool)
    for known_lt in known_Klt:
        is_kept_Klt |= live_Klt == known_lt
    return ~is_kept_Klt & is_known_t


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the world: by layer (of the whole model), and of tokens."""

    changed_L: list[float]
    moved_L: list[float]
    compared_L: list[float]
    consumed_L: list[float]
    changed_tokens: float
    compared_tokens: float
    unknown_tokens: float
    cached_bytes: float

    def metrics(self, name: str, top_k: int, *, compares: bool) -> list[Metric]:
        """As METRICS describes them."""
        held = Metric("routes/cached_bytes", self.cached_bytes)
        if not compares or not self.compared_tokens:
            return [held]
        layers = [layer for layer, count in enumerate(self.compared_L) if count]
        metrics = []
        for layer in layers:
            count, where = self.compared_L[layer], f"{name}/layer_{layer:02d}"
            metrics.append(Metric(f"{where}/changed_fraction", self.changed_L[layer], count * top_k))
            metrics.append(Metric(f"{where}/gate_mass_moved", self.moved_L[layer], count))
        compared = sum(self.compared_L)
        return [
            *metrics,
            Metric(f"{name}/changed_fraction", sum(self.changed_L), compared * top_k),
            Metric(f"{name}/gate_mass_moved", sum(self.moved_L), compared),
            Metric(f"{name}/changed_tokens_fraction", self.changed_tokens, self.compared_tokens),
            Metric(f"{name}/compared_tokens", self.compared_tokens),
            Metric(f"{name}/unknown_tokens", self.unknown_tokens),
            held,
        ]

    def problems(self, routed: Sequence[bool]) -> Iterator[str]:
        """Layers of the model that route, but in which other tokens were accounted for than in most."""
        most = max((self.consumed_L[layer] for layer, routes in enumerate(routed) if routes), default=0.0)
        for layer, routes in enumerate(routed):
            if self.consumed_L[layer] != (most if routes else 0.0):
                yield (
                    f"layer {layer} of the model took the routes of {self.consumed_L[layer]:.0f} tokens, others of "
                    f"{most:.0f}; it should be {'all' if routes else 'none'}"
                )


@dataclass(frozen=True, slots=True)
class Counted:
    """This rank's part of Totals; layers by column."""

    layers: tuple[int, ...]
    sums_l2: Tensor
    compared: int
    consumed_l: list[int]
    is_changed_t: Tensor
    """uint8: in any of this rank's layers."""
    unknown: int
    cached_bytes: int


def world_totals(part: Counted, num_layers: int, mesh: Mesh) -> Totals:
    """Collective over the world: each token counts once in each layer."""
    dist.all_reduce(part.is_changed_t, op=dist.ReduceOp.MAX, group=mesh.pp.group)
    device = part.sums_l2.device
    table = torch.zeros(num_layers + 1, 4, dtype=torch.float64, device=device)
    # Without sequence parallelism the tensor-parallel ranks have the same tokens.
    if mesh.sequence_parallel or mesh.tp.rank == 0:
        rows = torch.tensor(part.layers, dtype=torch.int64, device=device)
        counts_l2 = torch.tensor([[part.compared, count] for count in part.consumed_l], device=device)
        table[rows] = torch.cat([part.sums_l2, counts_l2.view(-1, 2)], 1).double()
        if mesh.is_last_stage:
            table[-1, 0] = part.is_changed_t.sum()
            table[-1, 1:3] = torch.tensor([part.compared, part.unknown])
    table[-1, 3] = part.cached_bytes
    dist.all_reduce(table, group=mesh.world.group)
    *layers, facts = table.tolist()
    changed_L, moved_L, compared_L, consumed_L = (list(column) for column in zip(*layers, strict=True))
    return Totals(changed_L, moved_L, compared_L, consumed_L, *facts)
