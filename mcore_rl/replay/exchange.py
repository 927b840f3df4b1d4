"""Exchange of routes: from the ranks that have them to only the ranks that need them.

Each rank announces which positions and layers of which samples it has. From these announcements, every rank chooses
which rank to ask for which routes, and one all-to-all carries the answers. An answer is the bytes of the routes, then a
checksum for each of its layers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.megatron.agree import from_every_rank
from mcore_rl.megatron.mesh import Axis
from mcore_rl.megatron.platform import to_device

CHECKSUM_BYTES = 8
PositionRange = tuple[int, int]
"""First position, and the position after the last."""
NO_POSITIONS = torch.zeros(0, dtype=torch.int64)


class SharedRows(NamedTuple):
    """Leading positions of a sample that have the same routes as another sample, because they share a prompt."""

    sample: int
    """The other sample, from the same rank."""
    num_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedRoutes:
    """Routes of one sample that this rank offers to all ranks."""

    num_tokens: int
    """Number of tokens in the whole sample."""
    layers: tuple[int, ...]
    position_n: Tensor
    """Positions of the sample on this rank, ascending."""
    checksum_l: Tensor
    """Checksum of the whole sample, not only of this rank's positions, in each of these layers."""
    read: Callable[[Tensor], Tensor]
    """Function that returns codes `[n, l, K]` on the CPU for some indices into `position_n`, and reads only those."""
    missing_n: Tensor = NO_POSITIONS
    """Positions of the whole sample that have no routes on any rank, ascending; they are not in the checksum."""
    shared: SharedRows | None = None
    """Leading positions taken from another sample with the same prefix; None if there are none."""


@dataclass(frozen=True, slots=True)
class NeededPositions:
    """Positions of one sample for which this rank needs routes, in all of its layers."""

    num_tokens: int
    """Number of tokens in the whole sample."""
    position_n: Tensor
    """Positions, ascending."""


@dataclass(frozen=True, slots=True)
class ReceivedRoutes:
    """Received routes of one sample, on the CPU."""

    num_tokens: int
    """Number of tokens in the whole sample."""
    position_n: Tensor
    codes_nlK: Tensor
    checksum_l: Tensor
    """Checksum of the whole sample in each layer."""
    missing_n: Tensor = NO_POSITIONS
    """Positions of the whole sample that have no routes on any rank, ascending."""
    shared: SharedRows | None = None
    """Leading positions with routes that were received with another sample; None if there are none."""


class RouteOffer(NamedTuple):
    """Announcement to all ranks that a rank has these positions and layers of a sample."""

    num_tokens: int
    layers: tuple[int, ...]
    ranges: tuple[PositionRange, ...]
    missing: tuple[PositionRange, ...]
    """Positions of the whole sample that have no routes on any rank."""
    shared: SharedRows | None
    """Leading positions taken from another sample with the same prefix."""


class RouteRequest(NamedTuple):
    """Request to one rank for these positions and layers of a sample."""

    sample: int
    ranges: tuple[PositionRange, ...]
    layers: tuple[int, ...]

    def route_bytes(self, layer_bytes: int) -> int:
        """Return the size in bytes of the routes in the answer; a token's route in one layer takes `layer_bytes`."""
        return sum(end - begin for begin, end in self.ranges) * len(self.layers) * layer_bytes

    def answer_bytes(self, layer_bytes: int) -> int:
        """Return the size in bytes of the answer."""
        return self.route_bytes(layer_bytes) + len(self.layers) * CHECKSUM_BYTES


def exchange(
    offered: Mapping[int, OfferedRoutes],
    needed: Mapping[int, NeededPositions],
    layers: tuple[int, ...],
    axis: Axis,
    device: torch.device,
    *,
    top_k: int,
    dtype: torch.dtype,
) -> dict[int, ReceivedRoutes]:
    """Collective over `axis`: fetch the routes of the `needed` samples, in `layers`, from ranks that offer them; a
    sample is left out if the ranks together do not have all of its positions. `layers` may differ from rank to rank;
    `dtype` (of the codes) may not.

    Positions without routes on any rank are not returned; positions shared with another sample are returned with it.
    """
    offers_here = {
        sample: RouteOffer(
            routes.num_tokens, routes.layers, as_ranges(routes.position_n), as_ranges(routes.missing_n), routes.shared
        )
        for sample, routes in offered.items()
    }
    offers = from_every_rank(offers_here, axis.group)
    offer_of = {sample: offer for of_rank in offers for sample, offer in of_rank.items()}
    needed = with_shared_once(needed, offer_of)
    requests = plan_requests(needed, layers, offers, axis.rank)
    to_answer = [of_rank.get(axis.rank, []) for of_rank in from_every_rank(requests, axis.group)]
    outgoing = [
        [part for request in of_rank for part in answer(offered[request.sample], request)] for of_rank in to_answer
    ]
    sizes_out = [sum(map(len, parts)) for parts in outgoing]
    sent = torch.cat([torch.zeros(0, dtype=torch.uint8), *(part for parts in outgoing for part in parts)])
    layer_bytes = top_k * dtype.itemsize
    sizes_in = [
        sum(request.answer_bytes(layer_bytes) for request in requests.get(rank, [])) for rank in range(axis.size)
    ]
    received = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, to_device(sent, device), sizes_in, sizes_out, group=axis.group)
    assembled = assemble(needed, requests, received.cpu(), layers, top_k=top_k, dtype=dtype)
    return {
        sample: replace(routes, missing_n=positions(offer_of[sample].missing), shared=offer_of[sample].shared)
        for sample, routes in assembled.items()
    }


def with_shared_once(
    needed: Mapping[int, NeededPositions], offer_of: Mapping[int, RouteOffer]
) -> dict[int, NeededPositions]:
    """Return the positions to receive: those that some rank has, a shared one once, of the sample that provides it."""
    arriving: dict[int, NeededPositions] = {}
    for sample, of_sample in needed.items():
        offer = offer_of.get(sample)
        position_n = of_sample.position_n
        if offer is not None:
            position_n = without(position_n, positions(offer.missing))
            if offer.shared is not None:
                is_shared_n = position_n < offer.shared.num_positions
                giver = offer.shared.sample
                _add(arriving, giver, offer_of[giver].num_tokens, position_n[is_shared_n])
                position_n = position_n[~is_shared_n]
        _add(arriving, sample, of_sample.num_tokens, position_n)
    return arriving


def _add(arriving: dict[int, NeededPositions], sample: int, num_tokens: int, position_n: Tensor) -> None:
    before = arriving.get(sample)
    both_n = position_n if before is None else torch.cat([before.position_n, position_n]).unique()
    arriving[sample] = NeededPositions(num_tokens if before is None else before.num_tokens, both_n)


def plan_requests(
    needed: Mapping[int, NeededPositions],
    layers: tuple[int, ...],
    offers: Sequence[Mapping[int, RouteOffer]],
    rank: int,
) -> dict[int, list[RouteRequest]]:
    """Choose which rank to ask for which routes: this rank first, then the others in turn. `offers` has each rank's
    offers by sample. No (position, layer) is requested twice, except where a rectangle of positions x layers overlaps
    an earlier request. Returns requests by the rank that they go to.
    """
    order = [(rank + step) % len(offers) for step in range(len(offers))]
    requests: dict[int, list[RouteRequest]] = {}
    for sample, positions_needed in needed.items():
        position_n, own = positions_needed.position_n, offers[rank].get(sample)
        whole = (positions_needed.num_tokens, layers, as_ranges(position_n))
        if layers and own is not None and (own.num_tokens, own.layers, own.ranges) == whole:
            # A shortcut with the same result as the code below; without replicas every sample takes it.
            requests.setdefault(rank, []).append(RouteRequest(sample, own.ranges, layers))
            continue
        # The last row is the checksum, which is needed in every layer even if no position is.
        is_missing_nl = torch.ones(len(position_n) + 1, len(layers), dtype=torch.bool)
        for other in order:
            offer = offers[other].get(sample)
            if offer is None or offer.num_tokens != positions_needed.num_tokens or not is_missing_nl.any():
                continue
            has_n = torch.cat([torch.isin(position_n, positions(offer.ranges)), torch.tensor([True])])
            has_l = torch.tensor([layer in offer.layers for layer in layers], dtype=torch.bool)
            is_new_nl = is_missing_nl & has_n[:, None] & has_l
            if not is_new_nl.any():
                continue
            row_n, column_l = is_new_nl.any(1), is_new_nl.any(0)
            row_n[-1] = True  # a checksum comes with every answer
            requested = tuple(layer for layer, is_new in zip(layers, column_l, strict=True) if is_new)
            request = RouteRequest(sample, as_ranges(position_n[row_n[:-1]]), requested)
            requests.setdefault(other, []).append(request)
            is_missing_nl &= ~(row_n[:, None] & column_l)
    return requests


def answer(offered: OfferedRoutes, request: RouteRequest) -> list[Tensor]:
    """Return the bytes of an answer: the routes, then the checksum of each requested layer."""
    columns = [offered.layers.index(layer) for layer in request.layers]
    row_n = torch.searchsorted(offered.position_n, positions(request.ranges))
    parts = picked(offered.read(row_n), columns), offered.checksum_l[columns]
    return [part.contiguous().view(-1).view(torch.uint8) for part in parts]


def picked(codes_nLK: Tensor, columns: Sequence[int]) -> Tensor:
    """Return the codes in these layers: themselves if these are all of them in order."""
    is_whole = list(columns) == list(range(codes_nLK.shape[1]))
    return codes_nLK if is_whole else codes_nLK.index_select(1, torch.tensor(columns, dtype=torch.int64))


def assemble(
    needed: Mapping[int, NeededPositions],
    requests: Mapping[int, list[RouteRequest]],
    received: Tensor,
    layers: tuple[int, ...],
    *,
    top_k: int,
    dtype: torch.dtype,
) -> dict[int, ReceivedRoutes]:
    """Assemble samples from the answers to `requests`, in rank order; a sample with missing parts is left out."""
    samples: dict[int, ReceivedRoutes] = {}
    is_missing: dict[int, Tensor] = {}
    begin, layer_bytes = 0, top_k * dtype.itemsize
    in_order = [request for rank in sorted(requests) for request in requests[rank]]
    num_answers = Counter(request.sample for request in in_order)
    for request in in_order:
        sample, position_n = request.sample, needed[request.sample].position_n
        routes_end = begin + request.route_bytes(layer_bytes)
        end = begin + request.answer_bytes(layer_bytes)
        # clone: a view as wider integers must begin at a multiple of their size.
        codes = received[begin:routes_end].clone().view(dtype)
        found_nlK = codes.view(-1, len(request.layers), top_k)
        given_l = received[routes_end:end].clone().view(torch.int64)
        begin = end
        is_whole = request.layers == layers and request.ranges == as_ranges(position_n)
        if is_whole and num_answers[sample] == 1:
            num_tokens = needed[sample].num_tokens
            samples[sample] = ReceivedRoutes(num_tokens, position_n, found_nlK, given_l)
            continue
        if sample not in samples:
            codes_nlK = torch.zeros(len(position_n), len(layers), top_k, dtype=dtype)
            checksum_l = torch.zeros(len(layers), dtype=torch.int64)
            samples[sample] = ReceivedRoutes(needed[sample].num_tokens, position_n, codes_nlK, checksum_l)
            is_missing[sample] = torch.ones(len(position_n) + 1, len(layers), dtype=torch.bool)
        row_n = torch.searchsorted(position_n, positions(request.ranges))
        column_l = torch.tensor([layers.index(layer) for layer in request.layers])
        samples[sample].codes_nlK[row_n[:, None], column_l] = found_nlK
        samples[sample].checksum_l[column_l] = given_l
        is_missing[sample][row_n[:, None], column_l] = False
        is_missing[sample][-1, column_l] = False
    return {
        sample: routes for sample, routes in samples.items() if sample not in is_missing or not is_missing[sample].any()
    }


def as_ranges(position_n: Tensor) -> tuple[PositionRange, ...]:
    """Return the runs of consecutive positions in `position_n`, which must be ascending."""
    if not len(position_n):
        return ()
    begin, last = int(position_n[0]), int(position_n[-1])
    if last - begin + 1 == len(position_n):
        return ((begin, last + 1),)
    breaks = (position_n.diff() != 1).nonzero()[:, 0] + 1
    bounds = [0, *breaks.tolist(), len(position_n)]
    firsts, lasts = position_n[bounds[:-1]].tolist(), position_n[torch.tensor(bounds[1:]) - 1].tolist()
    return tuple((first, last + 1) for first, last in zip(firsts, lasts, strict=True))


def without(position_n: Tensor, missing_n: Tensor) -> Tensor:
    """Return the positions that are not in `missing_n`, in the same order."""
    return position_n[~torch.isin(position_n, missing_n)] if len(missing_n) else position_n


def positions(ranges: Sequence[PositionRange]) -> Tensor:
    """Return the positions in these ranges, int64."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(*pair) for pair in ranges)])
