"""Routes of the samples of a step, for this rank's layers and tokens, whatever pass they came from or go to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.parallel.agree import world_max
from mcore_rl.parallel.mesh import Axis, Mesh
from mcore_rl.parallel.routers import routed_layers
from mcore_rl.replay.exchange import Form, Holding, Piece, Want, exchange
from mcore_rl.replay.layouts import Layout, LocalTokens, local_tokens
from mcore_rl.replay.storage import Blocks, Codec

GIB = 2**30
CPU = torch.device("cpu")


@dataclass(slots=True)
class Entry:
    """Routes of one sample: the rows `first` and following of a block, one for each of these positions."""

    num_tokens: int
    position_n: Tensor
    """Rising; those that this rank holds."""
    block: int
    first: int
    sum_l: Tensor | None = None
    """Checksum of the whole sample; None: its pass has not finished."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the routes of a microbatch's tokens are: rows of blocks, and the tokens they belong to."""

    parts: tuple[tuple[int, Tensor, Tensor], ...]
    """Block, rows, tokens."""
    is_found_t: Tensor
    problems: tuple[str, ...]


class RoutingCache:
    """Routes by (policy version, sample), which layouts and meshes may come and go around.

    A rank holds the positions that its routers saw in the pass that recorded them, for its own layers; where a later
    pass needs others, `rearrange` fetches them. Codes are experts; a choice that found its expert full is the expert
    plus `num_experts`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        model: ModelConfig,
        config: ReplayConfig,
        folder: Path | None = None,
    ) -> None:
        """`folder` is this rank's own, for config.store="file" and for what is beyond the budget."""
        self.layers = routed_layers(chunks)
        self.model_layers = tuple(layer for layer, routes in enumerate(model.moe_layers) if routes)
        self.num_experts, self.top_k = model.moe.num_experts, model.moe.top_k
        self.num_codes = self.num_experts * (2 if model.moe.capacity_factor else 1)
        self.codec = Codec(self.num_codes, len(self.layers), self.top_k, config.bit_pack)
        self.dtype = self.codec.dtype
        self._missing = config.missing
        self._device = next(chunks[0].parameters()).device
        budget_bytes = None if config.budget_gib is None else int(config.budget_gib * GIB)
        self._blocks = Blocks(config.store, budget_bytes, folder, self._device)
        self._entries: dict[tuple[int, int], Entry] = {}

    @property
    def num_bytes(self) -> int:
        """That routes take on this rank."""
        return self._blocks.num_bytes

    def samples(self, version: int) -> list[int]:
        """Of which routes are held, rising."""
        return sorted(sample for of, sample in self._entries if of == version)

    def entry(self, version: int, sample: int) -> Entry:
        """What is held of a sample."""
        return self._entries[version, sample]

    def find(self, version: int, tokens: LocalTokens) -> Place:
        """Where the routes of these tokens are."""
        if not self.layers:
            return Place((), tokens.is_real_t, ())
        is_found_t = torch.zeros(len(tokens.owner_t), dtype=torch.bool)
        parts, problems = [], []
        for owner, (sample, length) in enumerate(zip(tokens.samples, tokens.lengths, strict=True)):
            entry = self._entries.get((version, sample))
            if entry is None and self._missing == "live":
                continue
            place_n = (tokens.owner_t == owner).nonzero()[:, 0]
            row_n, problem = _rows(entry, length, tokens.position_t[place_n])
            if entry is None or problem:
                where = f"sample {sample} of version {version}, layers {list(self.layers)}"
                problems.append(f"{where}: {problem}")
                continue
            is_found_t[place_n] = True
            parts.append((entry.block, entry.first + row_n, place_n))
        return Place(_merged(parts), is_found_t, tuple(problems))

    def read(self, place: Place, device: torch.device) -> Tensor:
        """Codes `[t, l, K]`; zeros where nothing was found."""
        shape = (len(place.is_found_t), len(self.layers), self.top_k)
        if len(place.parts) == 1 and len(place.parts[0][2]) == shape[0]:
            block, row_n, _ = place.parts[0]
            return self.codec.decode(self._blocks.rows(block, row_n, device))
        codes_tlK = torch.zeros(shape, dtype=self.dtype, device=device)
        for block, row_n, place_n in place.parts:
            found_nlK = self.codec.decode(self._blocks.rows(block, row_n, device))
            codes_tlK[place_n.to(device, non_blocking=True)] = found_nlK
        return codes_tlK

    def add(self, version: int, tokens: LocalTokens, codes_tlK: Tensor) -> None:
        """Keep the routes of a microbatch's tokens, without its padding."""
        # By sample, and in each by position.
        order_t = (tokens.owner_t * 2**32 + tokens.position_t).argsort()
        order_n = order_t[int((~tokens.is_real_t).sum()) :]
        rows_nw = self.codec.encode(codes_tlK[order_n.to(codes_tlK.device, non_blocking=True)])
        block, first = self._blocks.add(rows_nw), 0
        position_n, owner_n = tokens.position_t[order_n], tokens.owner_t[order_n]
        counts = torch.bincount(owner_n, minlength=len(tokens.samples)).tolist()
        for sample, length, count in zip(tokens.samples, tokens.lengths, counts, strict=True):
            assert (version, sample) not in self._entries, f"sample {sample} of version {version} twice"
            here = slice(first, first + count)
            self._entries[version, sample] = Entry(length, position_n[here], block, first)
            first += count

    def seal(self, version: int, sums: Mapping[int, Tensor]) -> None:
        """Keep the checksum of each whole sample, by which all later passes are judged."""
        for sample, sum_l in sums.items():
            self._entries[version, sample].sum_l = sum_l

    def sum_of(self, version: int, sample: int) -> Tensor | None:
        """The checksum `[l]` of the whole sample; None: nothing is known of it."""
        entry = self._entries.get((version, sample))
        return None if entry is None else entry.sum_l

    def drop(self, version: int) -> None:
        """Forget all samples of a policy version, and delete their files."""
        gone = [key for key in self._entries if key[0] == version]
        for block in {self._entries.pop(key).block for key in gone}:
            self._blocks.drop(block)

    def close(self) -> None:
        """Forget everything."""
        for version in {version for version, _ in self._entries}:
            self.drop(version)

    def put(self, version: int, pieces: Mapping[int, Piece]) -> None:
        """Keep routes that came from elsewhere."""
        if not pieces:
            return
        block = self._blocks.add(
            torch.cat([self.codec.encode(piece.codes_nlK.to(self._device)) for piece in pieces.values()])
        )
        first = 0
        for sample, piece in pieces.items():
            assert (version, sample) not in self._entries, f"sample {sample} of version {version} twice"
            self._entries[version, sample] = Entry(
                piece.num_tokens, piece.position_n, block, first, piece.sum_l
            )
            first += len(piece.position_n)

    def codes(self, entry: Entry, row_n: Tensor, device: torch.device = CPU) -> Tensor:
        """Codes `[n, l, K]` of some of an entry's rows."""
        return self.codec.decode(self._blocks.rows(entry.block, entry.first + row_n, device))

    def wants(self, layouts: Sequence[Layout], mesh: Mesh) -> dict[int, Want]:
        """Of each sample the positions that this rank's routers will see in a pass over `layouts`."""
        wanted: dict[int, Want] = {}
        for part in (local_tokens(layout, mesh) for layout in layouts):
            for owner, (sample, length) in enumerate(zip(part.samples, part.lengths, strict=True)):
                wanted[sample] = Want(length, part.positions_of(owner))
        return wanted

    def rearrange(self, version: int, layouts: Sequence[Layout], mesh: Mesh) -> None:
        """Collective over the world: hold what a pass over `layouts` needs, from whoever has it.

        Nothing moves where no rank lacks anything; else only what is wanted where it is not.
        """
        wanted = self.wants(layouts, mesh)
        lacks = not all(self._has(version, *pair) for pair in wanted.items())
        if world_max(int(lacks)):
            self.receive(version, self.holdings(version), wanted, mesh.world)

    def receive(
        self, version: int, held: Mapping[int, Holding], wanted: Mapping[int, Want], axis: Axis
    ) -> None:
        """Collective over `axis`: hold `wanted`, as far as any rank has it in `held`, and nothing else."""
        pieces = exchange(held, wanted, self.form, axis, self._device)
        self.drop(version)
        self.put(version, pieces)

    @property
    def form(self) -> Form:
        """Of the routes of this rank."""
        return Form(self.layers, self.top_k, self.dtype)

    def holdings(self, version: int) -> dict[int, Holding]:
        """What is held of a version, to give to others."""
        return {sample: self._holding(version, sample) for sample in self.samples(version)}

    def _has(self, version: int, sample: int, want: Want) -> bool:
        entry = self._entries.get((version, sample))
        return entry is not None and bool(torch.isin(want.position_n, entry.position_n).all())

    def _holding(self, version: int, sample: int) -> Holding:
        entry = self._entries[version, sample]
        assert entry.sum_l is not None, f"sample {sample}: its pass has not finished"
        return Holding(
            num_tokens=entry.num_tokens,
            layers=self.layers,
            position_n=entry.position_n,
            sum_l=entry.sum_l,
            read=lambda row_n: self.codes(entry, row_n),
        )


def _rows(entry: Entry | None, length: int, position_n: Tensor) -> tuple[Tensor, str]:
    """The entry's rows of these positions of a sample of `length` tokens; else why they cannot be read."""
    if entry is None:
        return position_n, "there are no routes"
    if entry.num_tokens != length:
        return position_n, f"{length} tokens, but routes of {entry.num_tokens}"
    if entry.sum_l is None:
        return position_n, "the pass that recorded the routes has not finished"
    row_n = torch.searchsorted(entry.position_n, position_n)
    if len(position_n) and (
        int(row_n.max()) >= len(entry.position_n) or not torch.equal(entry.position_n[row_n], position_n)
    ):
        return row_n, "laid out otherwise than in the pass that the routes are of, and not rearranged since"
    return row_n, ""


def _merged(parts: Iterable[tuple[int, Tensor, Tensor]]) -> tuple[tuple[int, Tensor, Tensor], ...]:
    """One part a block."""
    by_block: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for block, row_n, place_n in parts:
        by_block.setdefault(block, []).append((row_n, place_n))
    merged = []
    for block, pairs in by_block.items():
        row_n, place_n = (torch.cat(columns) for columns in zip(*pairs, strict=True))
        order_n = place_n.argsort()
        merged.append((block, row_n[order_n], place_n[order_n]))
    return tuple(merged)
