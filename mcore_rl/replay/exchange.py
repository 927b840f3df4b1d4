"""Routes from the ranks that have them to the ranks that need them, and to no others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.parallel.mesh import Axis

SUM_BYTES = 8
Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What this rank has of a sample."""

    num_tokens: int
    layers: tuple[int, ...]
    position_n: Tensor
    """Rising."""
    sum_l: Tensor
    """Of the whole sample, not only of these positions."""
    read: Callable[[Tensor], Tensor]
    """Codes `[n, l, K]` of some rows, on the CPU."""


@dataclass(frozen=True, slots=True)
class Want:
    """What this rank needs of a sample."""

    num_tokens: int
    position_n: Tensor
    """Rising."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What it then has; on the CPU."""

    num_tokens: int
    position_n: Tensor
    codes_nlK: Tensor
    sum_l: Tensor


@dataclass(frozen=True, slots=True)
class Request:
    """To one rank: these positions and layers of a sample."""

    sample: int
    ranges: tuple[Range, ...]
    layers: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """In all ranges."""
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Form:
    """How routes look on the way: `[n, l, K]` of `dtype`, for these layers of the receiver."""

    layers: tuple[int, ...]
    top_k: int
    dtype: torch.dtype

    def num_bytes(self, request: Request) -> int:
        """Of the codes of an answer."""
        return len(request.layers) * request.num_positions * self.top_k * self.dtype.itemsize

    def size(self, request: Request) -> int:
        """Of an answer in bytes: the codes, and a checksum a layer."""
        return self.num_bytes(request) + len(request.layers) * SUM_BYTES


Offer = tuple[int, tuple[int, ...], tuple[Range, ...]]
"""Tokens, layers and positions that a rank has of a sample."""


def exchange(
    held: Mapping[int, Holding],
    wanted: Mapping[int, Want],
    form: Form,
    axis: Axis,
    device: torch.device,
) -> dict[int, Piece]:
    """Collective over `axis`: what is to be had of `wanted`; samples that nobody has whole are left out.

    Each rank tells what it has (a few numbers a sample) and asks for what it lacks; the routes travel once, from one
    rank that has them, this one first.
    """
    offers = _offers(held, axis)
    requests = plan(wanted, form.layers, offers, axis.rank)
    boxes: list[dict[int, list[Request]]] = [{} for _ in range(axis.size)]
    dist.all_gather_object(boxes, requests, group=axis.group)
    asked = [box.get(axis.rank, []) for box in boxes]
    outgoing = [b"".join(served(held[request.sample], request) for request in of_rank) for of_rank in asked]
    sizes_in = [sum(form.size(r) for r in requests.get(rank, [])) for rank in range(axis.size)]
    sizes_out = [len(payload) for payload in outgoing]
    sent = torch.frombuffer(bytearray(b"".join(outgoing) or b"\0"), dtype=torch.uint8)[: sum(sizes_out)]
    received = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent.to(device), sizes_in, sizes_out, group=axis.group)
    return assembled(wanted, requests, received.cpu(), form)


def as_ranges(position_n: Tensor) -> tuple[Range, ...]:
    """Runs of consecutive positions, each (first, after the last)."""
    if not len(position_n):
        return ()
    breaks = (position_n.diff() != 1).nonzero()[:, 0] + 1
    bounds = [0, *breaks.tolist(), len(position_n)]
    first, last = position_n[bounds[:-1]].tolist(), position_n[torch.tensor(bounds[1:]) - 1].tolist()
    return tuple((begin, end + 1) for begin, end in zip(first, last, strict=True))


def positions(ranges: Sequence[Range]) -> Tensor:
    """The positions in these ranges."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(*pair) for pair in ranges)])


def _offers(held: Mapping[int, Holding], axis: Axis) -> list[dict[int, Offer]]:
    mine: dict[int, Offer] = {
        sample: (holding.num_tokens, holding.layers, as_ranges(holding.position_n))
        for sample, holding in held.items()
    }
    boxes: list[dict[int, Offer]] = [{} for _ in range(axis.size)]
    dist.all_gather_object(boxes, mine, group=axis.group)
    return boxes


def plan(
    wanted: Mapping[int, Want], layers: tuple[int, ...], offers: Sequence[Mapping[int, Offer]], rank: int
) -> dict[int, list[Request]]:
    """Whom to ask for what: this rank itself first, then the others in turn from the next."""
    order = [(rank + step) % len(offers) for step in range(len(offers))]
    requests: dict[int, list[Request]] = {}
    for sample, want in wanted.items():
        # The last row stands for the checksum, which is needed of every layer, also without any position.
        lacks_nl = torch.ones(len(want.position_n) + 1, len(layers), dtype=torch.bool)
        for other in order:
            offer = offers[other].get(sample)
            if offer is None or offer[0] != want.num_tokens or not lacks_nl.any():
                continue
            has_n = torch.cat([torch.isin(want.position_n, positions(offer[2])), torch.tensor([True])])
            has_l = torch.tensor([layer in offer[1] for layer in layers], dtype=torch.bool)
            new_nl = lacks_nl & has_n[:, None] & has_l
            if not new_nl.any():
                continue
            row_n, column_l = new_nl.any(1), new_nl.any(0)
            row_n[-1] = True  # comes with every answer
            chosen = tuple(layer for layer, is_new in zip(layers, column_l, strict=True) if is_new)
            request = Request(sample, as_ranges(want.position_n[row_n[:-1]]), chosen)
            requests.setdefault(other, []).append(request)
            lacks_nl &= ~(row_n[:, None] & column_l)
    return requests


def served(holding: Holding, request: Request) -> bytes:
    """The answer: codes, then the checksums of these layers."""
    columns = [holding.layers.index(layer) for layer in request.layers]
    row_n = torch.searchsorted(holding.position_n, positions(request.ranges))
    codes = holding.read(row_n)[:, columns].contiguous()
    return bytes(codes.numpy().tobytes()) + bytes(holding.sum_l[columns].contiguous().numpy().tobytes())


def assembled(
    wanted: Mapping[int, Want], requests: Mapping[int, list[Request]], received: Tensor, form: Form
) -> dict[int, Piece]:
    """The samples from the answers to `requests`, in order of ranks, one behind the other."""
    pieces: dict[int, Piece] = {}
    lacks: dict[int, Tensor] = {}
    begin = 0
    for request in [request for rank in sorted(requests) for request in requests[rank]]:
        want, middle, end = (
            wanted[request.sample],
            begin + form.num_bytes(request),
            begin + form.size(request),
        )
        if request.sample not in pieces:
            pieces[request.sample] = _empty(want, form)
            lacks[request.sample] = torch.ones(len(want.position_n) + 1, len(form.layers), dtype=torch.bool)
        piece = pieces[request.sample]
        row_n = torch.searchsorted(want.position_n, positions(request.ranges))
        column_l = torch.tensor([form.layers.index(layer) for layer in request.layers])
        # Copies: a view of other numbers needs its own alignment.
        codes = received[begin:middle].clone().view(form.dtype)
        piece.codes_nlK[row_n[:, None], column_l] = codes.view(len(row_n), len(column_l), form.top_k)
        piece.sum_l[column_l] = received[middle:end].clone().view(torch.int64)
        lacks[request.sample][row_n[:, None], column_l] = False
        lacks[request.sample][-1, column_l] = False
        begin = end
    # One that is to be had in part only is left out: it is then found to be missing.
    return {sample: piece for sample, piece in pieces.items() if not lacks[sample].any()}


def _empty(want: Want, form: Form) -> Piece:
    codes = torch.zeros(len(want.position_n), len(form.layers), form.top_k, dtype=form.dtype)
    return Piece(want.num_tokens, want.position_n, codes, torch.zeros(len(form.layers), dtype=torch.int64))
