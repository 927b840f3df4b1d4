"""Cache of a step's routes, for this rank's layers and tokens, until the passes that impose them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.megatron.mesh import Axis, Mesh
from mcore_rl.megatron.platform import to_device
from mcore_rl.megatron.routers import routed_layers
from mcore_rl.megatron.vocab import zigzag_spans
from mcore_rl.replay.exchange import NO_POSITIONS, NeededPositions, OfferedRoutes, SharedRows, exchange


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Consecutive positions of a microbatch that hold one sample or the next segment of it, or only padding."""

    sample: int
    """Index of the sample in the rollout batch; -1 for padding."""
    num_tokens: int
    """Number of the sample's tokens in the span; they come first."""
    num_positions: int
    """Number of positions in the span: the tokens and the padding after them."""
    first_current: int = 0
    """First position in the sample with routes cached from the weights in training; earlier positions of the span have
    older weights' routes."""
    first_position: int = 0
    """Position in the sample of the span's first token."""


@dataclass(frozen=True, slots=True)
class MicrobatchLayout:
    """Layout of one microbatch before context and sequence parallelism divide it: context parallelism divides each span
    of packed rows separately, and a padded row, which is a single span, as a whole.
    """

    rows: tuple[tuple[SampleSpan, ...], ...]
    row_length: int
    """Number of positions in each row."""
    packed: bool

    def __post_init__(self) -> None:
        next_positions: dict[int, int] = {}
        for span in self.spans:
            if span.sample >= 0:
                expected = next_positions.get(span.sample, 0)
                assert span.first_position == expected, f"positions of sample {span.sample} are in the microbatch twice"
                next_positions[span.sample] = expected + span.num_tokens
        for row in self.rows:
            assert sum(span.num_positions for span in row) == self.row_length, (row, self.row_length)
            assert self.packed or len(row) == 1, row

    @property
    def spans(self) -> list[SampleSpan]:
        """Spans of all rows, in order."""
        return [span for row in self.rows for span in row]

    @property
    def num_tokens(self) -> dict[int, int]:
        """Number of tokens of each sample, in the order of the samples."""
        counts: dict[int, int] = {}
        for span in self.spans:
            if span.sample >= 0 and span.num_positions:
                counts[span.sample] = counts.get(span.sample, 0) + span.num_tokens
        return counts


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """The `t` tokens of a microbatch that this rank's routers see, in the routers' order; tensors are on the CPU."""

    samples: tuple[int, ...]
    """Samples of the whole microbatch; some of them may have no token on this rank."""
    lengths: tuple[int, ...]
    """Number of tokens of each whole sample."""
    sample_index_t: Tensor
    """Index into `samples` of each token's sample, int64; -1 for padding."""
    position_t: Tensor
    """Position of each token in its sample, int64; 0 for padding."""
    is_current_t: Tensor
    """Mask of the tokens with routes cached from the weights in training, bool `[t]`."""

    @property
    def is_real_t(self) -> Tensor:
        """Mask of the tokens that belong to a sample, bool `[t]`; False for padding."""
        return self.sample_index_t >= 0

    def positions_of(self, index: int) -> Tensor:
        """Return the positions of `samples[index]` on this rank, in ascending order."""
        return self.position_t[self.sample_index_t == index].sort().values


def local_tokens(layout: MicrobatchLayout, mesh: Mesh) -> LocalTokens:
    """Return the tokens of `layout` that this rank's routers see."""
    spans = [span for span in layout.spans if span.num_positions]
    num_tokens = layout.num_tokens
    index_of = {sample: index for index, sample in enumerate(num_tokens)}
    positions_N = torch.tensor([span.num_positions for span in spans])
    tokens_N = torch.tensor([span.num_tokens if span.sample >= 0 else 0 for span in spans])
    index_N = torch.tensor([index_of.get(span.sample, -1) for span in spans])
    begin_N = positions_N.cumsum(0) - positions_N
    position_T = torch.arange(int(positions_N.sum())) - begin_N.repeat_interleave(positions_N)
    is_real_T = position_T < tokens_N.repeat_interleave(positions_N)
    position_T += torch.tensor([span.first_position for span in spans]).repeat_interleave(positions_N)
    is_current_T = position_T >= torch.tensor([span.first_current for span in spans]).repeat_interleave(positions_N)
    index_T = index_N.repeat_interleave(positions_N)
    num_rows = 1 if layout.packed else len(layout.rows)
    # Sample indices and positions are divided by context and sequence parallelism just like token ids.
    columns = [index_T.where(is_real_T, -1), position_T * is_real_T, is_current_T | ~is_real_T]
    parts = [column_T.view(num_rows, -1) for column_T in columns]
    if mesh.cp.size > 1:
        lengths = positions_N.tolist() if layout.packed else [layout.row_length]
        parts = [zigzag_spans(full_BS, lengths, mesh.cp) for full_BS in parts]
    index_t, position_t, is_current_t = (router_order(part_Bs, mesh) for part_Bs in parts)
    return LocalTokens(
        samples=tuple(index_of),
        lengths=tuple(num_tokens.values()),
        sample_index_t=index_t,
        position_t=position_t,
        is_current_t=is_current_t,
    )


def router_order(values_Bs: Tensor, mesh: Mesh) -> Tensor:
    """Flatten `[B, s]`, already divided by context parallelism, in the order in which a router sees its tokens:
    position before row, as in hidden states `[s, B, D]`, and with sequence parallelism a contiguous chunk of the
    positions.
    """
    all_sB = values_Bs.t()
    local_sB = all_sB.chunk(mesh.tp.size)[mesh.tp.rank] if mesh.sequence_parallel else all_sB
    return local_sB.reshape(-1)


Store = Literal["device", "pinned"]


class RouteStorage:
    """Blocks of routes `[n, ...]` of any dtype, a row per token, in one kind of memory."""

    def __init__(self, store: Store, device: torch.device) -> None:
        """Page-locked memory needs a GPU: on a CPU both stores are ordinary main memory."""
        self._store, self._device = store, device
        self._blocks: dict[int, Tensor] = {}
        self._next_block = 0
        self._copies: dict[int, torch.cuda.Event] = {}
        """Copies from the device into blocks in main memory that have not been read yet."""

    @property
    def num_bytes(self) -> int:
        """Size of all blocks in bytes."""
        return sum(block.nbytes for block in self._blocks.values())

    def add(self, routes: Tensor) -> int:
        """Copy routes into a new block and return its index."""
        index, self._next_block = self._next_block, self._next_block + 1
        if self._store == "device":
            self._blocks[index] = routes.to(self._device, copy=True)
        else:
            pinned = torch.empty(routes.shape, dtype=routes.dtype, pin_memory=self._device.type == "cuda")
            self._blocks[index] = pinned.copy_(routes, non_blocking=True)
            if routes.is_cuda:
                self._copies[index] = torch.cuda.current_stream().record_event()
        return index

    def drop(self, block: int) -> None:
        """Remove a block."""
        # torch does not reuse page-locked memory before a copy into it has finished.
        del self._blocks[block]
        self._copies.pop(block, None)

    def read(self, block: int, rows_n: Tensor, device: torch.device) -> Tensor:
        """Return some rows of a block, `[n, ...]` on `device`; `rows_n` is on the CPU."""
        rows = self._blocks[block]
        copy = self._copies.pop(block, None)
        # The host reads the block, so the copy must be complete. It usually is, unless its pass is still running.
        if copy is not None and not copy.query():
            copy.synchronize()
        return to_device(rows[to_device(rows_n, rows.device)], device)


CPU = torch.device("cpu")
BYTE_CODES = 256
"""Largest number of codes for which a code takes one byte."""


@dataclass(slots=True)
class CachedSample:
    """Routes of one sample: row `first + i` of a storage block holds `position_n[i]`."""

    num_tokens: int
    """Number of tokens in the whole sample."""
    position_n: Tensor
    """Positions with routes on this rank, ascending."""
    block: int
    first: int
    checksum_l: Tensor | None = None
    """Checksum of the whole sample in each layer; None until the pass that records it has finished."""
    missing_n: Tensor = NO_POSITIONS
    """Positions without routes, ascending: they are not in the checksum, and are routed live."""
    shared: SharedRows | None = None
    """Leading positions with routes stored under another sample; None if this sample stores all of its own."""


@dataclass(frozen=True, slots=True)
class RouteLocations:
    """Where the routes of one microbatch's `t` local tokens are in the storage."""

    parts: tuple[tuple[int, Tensor, Tensor], ...]
    """Storage block, rows in it, and the tokens (indices below t) that the rows belong to."""
    has_routes_t: Tensor
    """Mask of the tokens with cached routes, bool `[t]` on the CPU; False for padding."""
    problems: tuple[str, ...]
    """One sentence for each sample that lacks routes on this rank."""


class RoutingCache:
    """Routes by (policy version, sample), independent of microbatches, packing and mesh. Each rank stores routes for
    its own layers and for the positions that its routers saw.

    A route is stored as a code: the expert's index, plus `num_experts` if the expert had no room for the token
    (`model.moe.capacity_factor`). A code is uint8, or int16 if there are over 256 codes (torch cannot index uint16).
    """

    def __init__(self, chunks: Sequence[nn.Module], model: ModelConfig, config: ReplayConfig) -> None:
        self.layers = routed_layers(chunks)
        self.model_layers = tuple(layer for layer, is_routed in enumerate(model.moe_layers) if is_routed)
        self.num_experts, self.top_k = model.moe.num_experts, model.moe.top_k
        self.num_codes = self.num_experts * (2 if model.moe.capacity_factor else 1)
        self.dtype = torch.uint8 if self.num_codes <= BYTE_CODES else torch.int16
        self._may_miss = config.missing == "live"
        self.device = next(chunks[0].parameters()).device
        self._storage = RouteStorage(config.store, self.device)
        self._samples: dict[tuple[int, int], CachedSample] = {}

    @property
    def num_bytes(self) -> int:
        """Size of this rank's routes in bytes."""
        return self._storage.num_bytes

    def samples(self, version: int) -> list[int]:
        """Return the samples of a policy version with routes on this rank, in ascending order."""
        return sorted(sample for of_version, sample in self._samples if of_version == version)

    def sample(self, version: int, sample: int) -> CachedSample:
        """Return the cached routes of a sample. Raises KeyError if there are none."""
        return self._samples[version, sample]

    def add_recorded(self, version: int, tokens: LocalTokens, codes_tlK: Tensor) -> None:
        """Store the routes of a microbatch's tokens, without padding; `set_checksums` follows after the pass."""
        # Sort by sample, then by position; padding (-1) comes first and is cut off.
        order_t = (tokens.sample_index_t * 2**32 + tokens.position_t).argsort()
        order_n = order_t[int((~tokens.is_real_t).sum()) :]
        block, first = self._storage.add(codes_tlK[to_device(order_n, codes_tlK.device)]), 0
        position_n, sample_index_n = tokens.position_t[order_n], tokens.sample_index_t[order_n]
        counts_N = torch.bincount(sample_index_n, minlength=len(tokens.samples)).tolist()
        for sample, length, count in zip(tokens.samples, tokens.lengths, counts_N, strict=True):
            assert (version, sample) not in self._samples, f"sample {sample} of version {version} twice"
            rows = slice(first, first + count)
            self._samples[version, sample] = CachedSample(length, position_n[rows], block, first)
            first += count

    def set_checksums(self, version: int, checksums: Mapping[int, Tensor]) -> None:
        """Store the checksum `[l]` of each whole sample, which later passes must reproduce."""
        for sample, checksum_l in checksums.items():
            self._samples[version, sample].checksum_l = checksum_l

    def checksum_of(self, version: int, sample: int) -> Tensor | None:
        """Return the checksum `[l]` of a whole sample; None if its routes are not cached or not complete."""
        cached = self._samples.get((version, sample))
        return None if cached is None else cached.checksum_l

    def missing_positions(self, version: int, sample: int, num_tokens: int) -> Tensor:
        """Return the positions without routes in a sample of `num_tokens` tokens, in ascending order."""
        cached = self._samples.get((version, sample))
        return torch.arange(num_tokens) if cached is None else cached.missing_n

    def locate(self, version: int, tokens: LocalTokens) -> RouteLocations:
        """Find the routes of a microbatch's local tokens."""
        if not self.layers:
            # A stage of dense layers has nothing to read, but its tokens count as known, as on the other stages.
            return RouteLocations((), tokens.is_real_t, ())
        has_routes_t = torch.zeros(len(tokens.sample_index_t), dtype=torch.bool)
        parts, problems = [], []
        for index, (sample, length) in enumerate(zip(tokens.samples, tokens.lengths, strict=True)):
            cached = self._samples.get((version, sample))
            token_n = (tokens.sample_index_t == index).nonzero()[:, 0]
            if cached is not None and len(cached.missing_n):
                if not self._may_miss:
                    problems.append(
                        f"sample {sample} of version {version}: {len(cached.missing_n)} of its {length} tokens have no "
                        f'routes, the first at position {int(cached.missing_n[0])}. replay.missing="live" routes such '
                        'tokens live, "refuse" leaves their completion out'
                    )
                token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n)]
            if cached is not None and cached.shared is not None:
                is_shared_n = tokens.position_t[token_n] < cached.shared.num_positions
                shared_n, token_n = token_n[is_shared_n], token_n[~is_shared_n]
                giver = self._samples.get((version, cached.shared.sample))
                num_tokens = 0 if giver is None else giver.num_tokens
                row_n, problem = _rows(giver, num_tokens, tokens.position_t[shared_n])
                if giver is None or problem:
                    problems.append(
                        f"sample {sample} of version {version}, layers {list(self.layers)}, the first "
                        f"{cached.shared.num_positions} tokens, kept with sample {cached.shared.sample}: {problem}"
                    )
                    continue
                has_routes_t[shared_n] = True
                parts.append((giver.block, giver.first + row_n, shared_n))
            row_n, problem = _rows(cached, length, tokens.position_t[token_n])
            if cached is None or problem:
                problems.append(f"sample {sample} of version {version}, layers {list(self.layers)}: {problem}")
                continue
            has_routes_t[token_n] = True
            parts.append((cached.block, cached.first + row_n, token_n))
        return RouteLocations(_merged_by_block(parts), has_routes_t, tuple(problems))

    def read(self, locations: RouteLocations, device: torch.device) -> Tensor:
        """Return the codes `[t, l, K]` of a microbatch's local tokens; zeros for tokens without routes."""
        shape = (len(locations.has_routes_t), len(self.layers), self.top_k)
        if len(locations.parts) == 1 and len(locations.parts[0][2]) == shape[0]:
            block, row_n, _ = locations.parts[0]
            return self._storage.read(block, row_n, device)
        codes_tlK = torch.zeros(shape, dtype=self.dtype, device=device)
        for block, row_n, token_n in locations.parts:
            codes_tlK[to_device(token_n, device)] = self._storage.read(block, row_n, device)
        return codes_tlK

    def codes(self, cached: CachedSample, index_n: Tensor) -> Tensor:
        """Return the codes `[n, l, K]` at some indices into a sample's `position_n`."""
        return self._storage.read(cached.block, cached.first + index_n, CPU)

    def drop(self, version: int) -> None:
        """Remove all samples of a policy version."""
        dropped = [key for key in self._samples if key[0] == version]
        for block in {self._samples.pop(key).block for key in dropped}:
            self._storage.drop(block)

    def add_mixed(self, version: int, sample: int, below: "RoutingCache", above: "RoutingCache", layer: int) -> None:
        """Store a sample's routes, taken from `below` in the layers before `layer` and from `above` in the rest.
        `below` is from a live pass: no router depends on a later layer. Both caches must be from passes over the same
        layouts.
        """
        lower, upper = below.sample(version, sample), above.sample(version, sample)
        assert lower.checksum_l is not None and upper.checksum_l is not None
        assert not len(upper.missing_n), "tokens without routes have no checksum of their own"
        is_below_l = torch.tensor([index < layer for index in self.layers])
        lower_nlK = below.codes(lower, torch.arange(len(lower.position_n)))
        codes_nlK = lower_nlK.where(is_below_l[:, None], above.codes_at(version, sample, lower.position_n))
        block = self._storage.add(to_device(codes_nlK, self.device))
        checksum_l = lower.checksum_l.where(is_below_l, upper.checksum_l)
        self._samples[version, sample] = CachedSample(lower.num_tokens, lower.position_n, block, 0, checksum_l)

    def codes_at(self, version: int, sample: int, position_n: Tensor) -> Tensor:
        """Return the codes `[n, l, K]` at some positions of a sample, all stored on this rank; some may be shared."""
        cached = self._samples[version, sample]
        is_own_n = torch.ones(len(position_n), dtype=torch.bool)
        codes_nlK = torch.empty((len(position_n), len(self.layers), self.top_k), dtype=self.dtype)
        if cached.shared is not None:
            is_own_n = position_n >= cached.shared.num_positions
            giver = self._samples[version, cached.shared.sample]
            codes_nlK[~is_own_n] = self.codes(giver, _found(giver, position_n[~is_own_n]))
        codes_nlK[is_own_n] = self.codes(cached, _found(cached, position_n[is_own_n]))
        return codes_nlK

    def needed_positions(self, layouts: Sequence[MicrobatchLayout], mesh: Mesh) -> dict[int, NeededPositions]:
        """Return the positions of each sample that this rank's routers will see in a pass over `layouts`."""
        needed: dict[int, NeededPositions] = {}
        for tokens in (local_tokens(layout, mesh) for layout in layouts):
            for index, (sample, length) in enumerate(zip(tokens.samples, tokens.lengths, strict=True)):
                needed[sample] = NeededPositions(length, tokens.positions_of(index))
        return needed

    def receive(
        self, version: int, offered: Mapping[int, OfferedRoutes], needed: Mapping[int, NeededPositions], axis: Axis
    ) -> None:
        """Collective over `axis`: replace a version's routes by the `needed` positions that some rank has `offered`."""
        received = exchange(offered, needed, self.layers, axis, self.device, top_k=self.top_k, dtype=self.dtype)
        self.drop(version)
        if not received:
            return
        codes_nlK = torch.cat([to_device(routes.codes_nlK, self.device) for routes in received.values()])
        block, first = self._storage.add(codes_nlK), 0
        for sample, routes in received.items():
            self._samples[version, sample] = CachedSample(
                routes.num_tokens, routes.position_n, block, first, routes.checksum_l, routes.missing_n, routes.shared
            )
            first += len(routes.position_n)


def _found(cached: CachedSample, position_n: Tensor) -> Tensor:
    index_n = torch.searchsorted(cached.position_n, position_n)
    assert torch.equal(cached.position_n[index_n], position_n), "the caches are of other layouts"
    return index_n


def _rows(cached: CachedSample | None, length: int, position_n: Tensor) -> tuple[Tensor, str]:
    """Return the indices of positions in a cached sample, and why they cannot be read ("" if they can)."""
    if cached is None:
        return position_n, "there are no routes"
    if cached.num_tokens != length:
        return position_n, f"the sample has {length} tokens, its routes are of {cached.num_tokens}"
    if cached.checksum_l is None:
        return position_n, "the pass that recorded the routes has not finished"
    row_n = torch.searchsorted(cached.position_n, position_n)
    if len(position_n) and (
        int(row_n.max()) >= len(cached.position_n) or not torch.equal(cached.position_n[row_n], position_n)
    ):
        return row_n, "this rank has other positions of it than the pass needs"
    return row_n, ""


def _merged_by_block(parts: Iterable[tuple[int, Tensor, Tensor]]) -> tuple[tuple[int, Tensor, Tensor], ...]:
    """Merge the parts of each block, tokens ascending, so that one read suffices and usually no scatter is needed."""
    by_block: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for block, row_n, token_n in parts:
        by_block.setdefault(block, []).append((row_n, token_n))
    merged = []
    for block, pairs in by_block.items():
        row_n, token_n = (torch.cat(columns) for columns in zip(*pairs, strict=True))
        order_n = token_n.argsort()
        merged.append((block, row_n[order_n], token_n[order_n]))
    return tuple(merged)
