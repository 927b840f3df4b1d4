"""Accounts of a pass: how often each router used its routes, how many choices changed, and world-wide sums of both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.metrics.metrics import Metric

# Multipliers of Murmur3's 64-bit finalizer (fmix64), as signed integers: torch has no unsigned 64-bit arithmetic.
FIRST, SECOND = -0x00AE502812AA7333, -0x3B314601E57A13AD
# fmix64 shifts logically; `>>` on int64 copies the sign, which this mask removes.
MASK = 2**31 - 1


def hashed(numbers: Tensor) -> Tensor:
    """Hash each int64 with Murmur3's finalizer, a bijection; the results look random."""
    mixed = numbers
    for factor in (FIRST, SECOND):
        mixed = (mixed ^ ((mixed >> 33) & MASK)) * factor
    return mixed ^ ((mixed >> 33) & MASK)


def token_hashes(ids_t: Tensor, position_t: Tensor, is_counted_t: Tensor) -> Tensor:
    """Return an odd int64 for each token id at its position, `[t]`; 0 where `is_counted_t` is False."""
    # "+ 1": zero is a fixed point of the hash, and token 0 at position 0 must not be.
    return (hashed(hashed(ids_t.long() + 1) ^ position_t) | 1) * is_counted_t


def expert_hashes(layers: Sequence[int], num_codes: int, device: torch.device) -> Tensor:
    """Return an int64 hash of each route code in each of these layers, `[l, codes]`."""
    layer_l = torch.tensor(layers, dtype=torch.int64, device=device)
    return hashed((layer_l[:, None] << 32) + torch.arange(num_codes, device=device) + 1)


def route_checksums(
    codes_Ktl: Tensor, expert_hashes_lE: Tensor, token_hashes_t: Tensor, sample_index_t: Tensor, num_samples: int
) -> Tensor:
    """Return the checksum of each sample's tokens in each layer, int64 `[num_samples, l]`. Tokens with hash 0 do not
    count; padding has sample index -1 and must have hash 0.
    """
    _, num_tokens, num_layers = codes_Ktl.shape
    first_l = torch.arange(num_layers, device=codes_Ktl.device) * expert_hashes_lE.shape[1]
    hashes_tl = torch.zeros(num_tokens, num_layers, dtype=torch.int64, device=codes_Ktl.device)
    # One of the K experts at a time: all at once take K times as much memory, and on a CPU four times as long.
    for codes_tl in codes_Ktl.contiguous():
        index_n = (codes_tl + first_l).view(-1)
        hashes_tl += expert_hashes_lE.flatten().index_select(0, index_n).view(num_tokens, num_layers)
    sums_Nl = hashes_tl.new_zeros(num_samples, num_layers)
    if num_samples:  # padding (-1) adds its zeros to sample 0
        sums_Nl.index_add_(0, sample_index_t.clamp_min(0), hashes_tl * token_hashes_t[:, None])
    return sums_Nl


@dataclass(frozen=True, slots=True)
class LayerAccount:
    """Token counts of one layer on this rank over one pass, without padding."""

    layer: int
    expected: int
    """Tokens of all microbatches."""
    consumed: int
    """Tokens that the router routed in the forward pass, by cached routes or live."""
    recomputed: int
    """Tokens that it routed again in recomputation."""


@dataclass(frozen=True, slots=True)
class RouteAccounts:
    """How often each layer's router gave the tokens of each microbatch to experts."""

    layers: tuple[int, ...]
    num_tokens: Sequence[int]
    """Tokens of each microbatch on this rank, without padding."""
    num_calls: Mapping[tuple[int, int], tuple[int, int]]
    """(layer, microbatch) -> calls in the forward pass and in recomputation, from the witness."""

    def by_layer(self) -> list[LayerAccount]:
        """Return the account of each of this rank's layers, in ascending order."""
        accounts = []
        for layer in self.layers:
            consumed, recomputed = (
                sum(
                    tokens * self.num_calls.get((layer, index), (0, 0))[kind]
                    for index, tokens in enumerate(self.num_tokens)
                )
                for kind in (0, 1)
            )
            accounts.append(LayerAccount(layer, sum(self.num_tokens), consumed, recomputed))
        return accounts

    def problems(self, samples: Sequence[Sequence[int]]) -> Iterator[str]:
        """Yield a sentence for each router that was not used exactly once; `samples` has each microbatch's samples."""
        for (layer, index), (forward, recomputed) in self.num_calls.items():
            where = f"layer {layer}, microbatch {index} (samples {list(samples[index])})"
            if forward == 0:
                yield f"{where}: no router took the routes, which are left over; the chunk calls another router"
            elif forward > 1:
                yield f"{where}: routes were taken {forward} times in one forward pass"
            elif recomputed > 1:
                yield f"{where}: routes were taken {recomputed} times in recomputation"


def changed_choices(live_ltK: Tensor, cached_ltK: Tensor, has_routes_t: Tensor) -> Tensor:
    """Mask `[K, l, t]`: True where a live choice is not among the token's cached experts; False without routes."""
    # K passes over long rows: ten times as fast on a CPU as one pass over K x K.
    live_Klt, cached_Klt = (codes.permute(2, 0, 1).contiguous() for codes in (live_ltK, cached_ltK))
    is_cached_Klt = torch.zeros_like(live_Klt, dtype=torch.bool)
    for cached_lt in cached_Klt:
        is_cached_Klt |= live_Klt == cached_lt
    return ~is_cached_Klt & has_routes_t


@dataclass(frozen=True, slots=True)
class RouteTotals:
    """World-wide sums over tokens, most of them for each layer `L` of the model."""

    changed_L: list[float]
    """Number of changed choices (token, slot)."""
    moved_gates_L: list[float]
    """Sum of the gates of the changed choices."""
    current_changed_L: list[float]
    """Number of changed choices of the tokens counted in `current_L`."""
    disjoint_L: list[float]
    """Tokens of `current_L` that share no expert with their cached choice."""
    compared_L: list[float]
    """Tokens with a live choice that was compared with a cached choice."""
    current_L: list[float]
    """Compared tokens with routes cached from the weights in training."""
    consumed_L: list[float]
    """Tokens that a router routed, by cached routes or live."""
    expert_choices_2LE: Tensor
    """How often tokens of `current_L` chose each expert live, and how often it was not cached; float64 on the CPU."""
    changed_tokens: float
    """Tokens with a changed choice in any layer."""
    compared_tokens: float
    unknown_tokens: float
    """Tokens without cached routes, which were routed live."""
    cached_bytes: float

    def metrics(self, name: str, top_k: int, *, compares: bool) -> list[Metric]:
        """Return the metrics `name`/..., described in METRICS; only the cached bytes if nothing was compared."""
        metrics = [Metric("routes/cached_bytes", self.cached_bytes)]
        if not compares:
            return metrics
        num_tokens = self.compared_tokens + self.unknown_tokens
        metrics.append(Metric(f"{name}/unknown_tokens", self.unknown_tokens))
        metrics.append(Metric(f"{name}/live_fraction", self.unknown_tokens, max(1.0, num_tokens)))
        if not self.compared_tokens:
            return metrics
        for layer, count in enumerate(self.compared_L):
            if count:
                prefix = f"{name}/layer_{layer:02d}"
                metrics.append(Metric(f"{prefix}/changed_fraction", self.changed_L[layer], count * top_k))
                metrics.append(Metric(f"{prefix}/gate_mass_moved", self.moved_gates_L[layer], count))
                if current := self.current_L[layer]:
                    metrics.append(Metric(f"{prefix}/disjoint_fraction", self.disjoint_L[layer], current))
        compared, current = sum(self.compared_L), sum(self.current_L)
        if current:
            metrics.append(Metric(f"{name}/disjoint_fraction", sum(self.disjoint_L), current))
        return [
            *metrics,
            Metric(f"{name}/changed_fraction", sum(self.changed_L), compared * top_k),
            Metric(f"{name}/gate_mass_moved", sum(self.moved_gates_L), compared),
            Metric(f"{name}/changed_tokens_fraction", self.changed_tokens, self.compared_tokens),
            Metric(f"{name}/compared_tokens", self.compared_tokens),
        ]

    def problems(self, is_routed_L: Sequence[bool]) -> Iterator[str]:
        """Yield a sentence for each layer with another token count than expected: all if it has a router, else none."""
        expected = max(
            (count for count, routed in zip(self.consumed_L, is_routed_L, strict=True) if routed), default=0.0
        )
        for layer, (count, is_routed) in enumerate(zip(self.consumed_L, is_routed_L, strict=True)):
            if count != (expected if is_routed else 0.0):
                yield (
                    f"layer {layer} of the model took the routes of {count:.0f} tokens, others of {expected:.0f}; it "
                    f"should be {'all' if is_routed else 'none'}"
                )


def world_totals(
    mesh: Mesh,
    num_layers: int,
    *,
    layers: tuple[int, ...],
    changes_l4: Tensor,
    expert_choices_2lE: Tensor,
    current_tokens: int,
    consumed_l: Sequence[int],
    is_changed_t: Tensor,
    compared_tokens: int,
    unknown_tokens: int,
    cached_bytes: int,
) -> RouteTotals:
    """Collective over the world: sum the accounts of all ranks so that each token counts once in each layer.

    `changes_l4` has, float64: changed choices, the sum of their gates, changed choices of current tokens, and current
    tokens with all choices changed. `expert_choices_2lE` counts how often current tokens chose each expert live, and
    how often it was not cached, int64. Current tokens have routes from the weights in training. `is_changed_t`, uint8,
    is reduced in place.
    """
    # A token's choice may have changed only in another pipeline stage: take the union first, then count.
    dist.all_reduce(is_changed_t, op=dist.ReduceOp.MAX, group=mesh.pp.group)
    device = changes_l4.device
    table = torch.zeros(num_layers + 1, 8, dtype=torch.float64, device=device)
    num_experts = expert_choices_2lE.shape[2]
    choices_2LE = torch.zeros(2, num_layers, num_experts, dtype=torch.int64, device=device)
    # Without sequence parallelism all tensor-parallel ranks have the same tokens: only the first counts them.
    if mesh.sequence_parallel or mesh.tp.rank == 0:
        rows = torch.tensor(layers, dtype=torch.int64, device=device)
        counts_l4 = torch.tensor(
            [[compared_tokens, current_tokens, count, unknown_tokens] for count in consumed_l], device=device
        )
        table[rows] = torch.cat([changes_l4, counts_l4.view(-1, 4)], 1).double()
        # All pipeline stages have the same tokens: only the last stage counts them.
        if mesh.is_last_stage:
            table[-1, 0] = is_changed_t.sum()
        choices_2LE[:, rows] = expert_choices_2lE
    table[-1, 1] = cached_bytes
    for sums in (table, choices_2LE):
        dist.all_reduce(sums, group=mesh.world.group)
    *by_layer, tokens = table.tolist()
    changed_L, moved_gates_L, current_changed_L, disjoint_L, compared_L, current_L, consumed_L, unknown_L = (
        list(column_L) for column_L in zip(*by_layer, strict=True)
    )
    # Every layer with a router sees all tokens; a stage, even the last, may have no such layer.
    return RouteTotals(
        changed_L,
        moved_gates_L,
        current_changed_L,
        disjoint_L,
        compared_L,
        current_L,
        consumed_L,
        choices_2LE.cpu().double(),
        changed_tokens=tokens[0],
        compared_tokens=max(compared_L),
        unknown_tokens=max(unknown_L),
        cached_bytes=tokens[1],
    )
