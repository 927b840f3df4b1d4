"""The tape of routing replay: it records, imposes or observes the experts that routers choose in one pass.

The files of this package in the order of a step: tape.py arms the routers of each chunk for one microbatch
(router_hooks.py); a recording pass adds their choices to a cache (cache.py, storage.py) by sample and position
(layouts.py), with a checksum (checksums.py); ranks exchange the routes that a later pass needs on other ranks
(exchange.py, from_rollouts.py); the next tape imposes them. A witness observes which tokens the routers then give to
which experts (witness.py), and the accounts of the pass compare this with the record (accounts.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mcore_rl.errors import RoutingError
from mcore_rl.megatron.agree import refuse_anywhere
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Ahead, to_device
from mcore_rl.megatron.schedule import Routing
from mcore_rl.metrics.metrics import Metric
from mcore_rl.replay import accounts as route_accounts
from mcore_rl.replay import cache as routing_cache
from mcore_rl.replay.router_hooks import ChunkMicrobatch, ChunkRouters, live_gates
from mcore_rl.replay.witness import Witness


@dataclass(slots=True)
class TapeMicrobatch:
    """One microbatch on this rank, over all of the rank's chunks; tensors with the axis `t` are on the device."""

    tokens: routing_cache.LocalTokens
    locations: routing_cache.RouteLocations
    """Where the cached routes of its tokens are."""
    sample_index_t: Tensor
    """Index of each token's sample, as in `tokens`."""
    has_routes_t: Tensor
    """Mask of the tokens with cached routes, as in `locations`."""
    is_current_t: Tensor
    """Mask of the tokens with routes cached from the weights in training, as in `tokens`."""
    token_hashes_t: Tensor | None = None
    """Factor of each token in the checksums; None before the first chunk has run."""
    checksums_Nl: Tensor | None = None
    """Checksums of the codes of this rank's part of its samples."""
    drop_checksums_Nl: Tensor | None = None
    """Contribution of dropped choices to the checksums; None if no choice is dropped."""
    is_changed_t: Tensor | None = None
    """Mask of the tokens with a changed choice in any chunk run so far."""
    disjoint_t: Tensor | None = None
    """Number of layers, in the chunks run so far, in which a current token shares no expert with its cached choice."""
    recorded_tlK: Tensor | None = None
    """Codes recorded in the chunks run so far."""
    num_chunks: int = 0
    """Number of chunks run so far."""


class RoutingTape:
    """Records the routes of one pass into a cache, imposes routes from it, or compares them with it.

    Call `record`, `impose` or `observe`, pass the returned routing to `run_pass`, then call `finish`:

        with RoutingTape(chunks, mesh, layouts, cache, version) as tape:
            run_pass(chunks, microbatches, head, backward=True, routing=tape.impose())
            metrics = tape.finish()

    Routers are armed for one chunk and one microbatch at a time, in recomputation too. Only the selection is imposed:
    gates are the live router's dense scores at the imposed experts. Padding, tokens without cached routes, and
    multi-token-prediction layers are routed live. Megatron computes balance losses from the live scores and the live
    choice; the expert bias is updated from the imposed choice.

    Live choices are compared with the routes of `against` if it is given, else of `cache` (`routes/...` in METRICS).
    Nothing waits for the device before `finish`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        layouts: Sequence[routing_cache.MicrobatchLayout],
        cache: routing_cache.RoutingCache,
        version: int,
        against: routing_cache.RoutingCache | None = None,
    ) -> None:
        """Collective over the world: prepare a pass over this rank's `layouts`. A recording pass is compared with
        `against`, if given. Raises RoutingError on all ranks if the chunks and a cache have different layers,
        ConfigError if a router cannot be replayed.
        """
        self._mesh, self._cache, self._version = mesh, cache, version
        self._compared_cache = against or cache
        self._routers = {chunk: ChunkRouters(chunk) for chunk in chunks}
        self._columns, self.layers = _columns(self._routers)
        refuse_anywhere(
            [
                f"routers here are of layers {list(self.layers)}, the cache is of layers {list(other.layers)}"
                for other in (cache, self._compared_cache)
                if other.layers != self.layers
            ],
            RoutingError,
        )
        self._config = get_model_config(chunks[0])
        self._device = next(chunks[0].parameters()).device
        self._ahead = Ahead(self._device)
        self._begun: dict[tuple[nn.Module, int], Callable[[], Tensor]] = {}
        """Reads of cached codes in progress, for one microbatch of each chunk."""
        self._microbatches: list[TapeMicrobatch] = []
        for tokens in (routing_cache.local_tokens(layout, mesh) for layout in layouts):
            locations = self._compared_cache.locate(version, tokens)
            index_t, has_routes_t, is_current_t = (
                to_device(values_t, self._device)
                for values_t in (tokens.sample_index_t, locations.has_routes_t, tokens.is_current_t)
            )
            self._microbatches.append(TapeMicrobatch(tokens, locations, index_t, has_routes_t, is_current_t))
        self._samples = [sample for microbatch in self._microbatches for sample in microbatch.tokens.samples]
        # Without sequence parallelism all tensor-parallel ranks have the same tokens, and would count them repeatedly.
        self._sharing = mesh.groups.tp_cp if mesh.sequence_parallel else mesh.groups.cp
        """Ranks that have parts of the same samples."""
        self._expert_hashes_lE = route_accounts.expert_hashes(self.layers, cache.num_codes, self._device)
        self._num_tokens = [int(microbatch.tokens.is_real_t.sum()) for microbatch in self._microbatches]
        self._layouts = layouts
        self._witness: Witness | None = None
        # For each layer: changed choices, the sum of their gates, changed choices of current tokens, and current
        # tokens with all choices changed.
        self._changes_l4 = torch.zeros(len(self.layers), 4, dtype=torch.float64, device=self._device)
        # How often current tokens chose each expert live, and how often it was not cached.
        self._choices_2lE = torch.zeros(2, len(self.layers), cache.num_experts, dtype=torch.int64, device=self._device)
        self.totals: route_accounts.RouteTotals | None = None
        """World-wide sums; None until the pass is finished."""
        self.disjoint_by_sample: dict[int, tuple[int, int]] = {}
        """For each sample of this rank's microbatches, summed over all ranks of the model: choices (token, layer) with
        no expert in common with the cached choice, and all choices compared with routes of the weights in training."""
        self._mode: Literal["unused", "record", "impose", "observe"] = "unused"
        self._compares = self._is_finished = False

    def __enter__(self) -> "RoutingTape":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        assert error is not None or self._is_finished, "the accounts of the pass were not checked: call finish()"

    def record(self) -> Routing:
        """Collective over the world: return routing for `run_pass` that adds the live choices to the cache. Raises
        RoutingError on all ranks if a sample has already been recorded.
        """
        return self._start("record", compares=self._compared_cache is not self._cache)

    def impose(self) -> Routing:
        """Collective over the world: return routing for `run_pass` that makes routers choose the cached experts. Raises
        RoutingError on all ranks if the cache lacks a route.
        """
        assert self._compared_cache is self._cache, "routes are imposed from the cache and compared with it"
        return self._start("impose", compares=True)

    def observe(self) -> Routing:
        """Collective over the world: return routing for `run_pass` that only compares live choices with the cache.
        Raises RoutingError on all ranks if the cache lacks a route.
        """
        return self._start("observe", compares=True)

    @property
    def accounts(self) -> list[route_accounts.LayerAccount]:
        """Accounts of this rank's layers and tokens so far."""
        return self._accounts().by_layer()

    def close(self) -> None:
        """Make every router live again; `finish` does this too."""
        self._begun.clear()
        if self._witness is not None:
            self._witness.remove()
        for routers in self._routers.values():
            routers.remove()

    def finish(self, name: str = "routes") -> list[Metric]:
        """Collective over the world, after the pass: return its metrics, named `name`/..., equal on all ranks. Raises
        RoutingError on all ranks, naming layer and samples, unless every router gave each microbatch's tokens to the
        recorded experts once in the forward pass and at most once in recomputation, with the live router's gates
        (witness.py).
        """
        assert self._mode != "unused" and self._witness is not None, "the tape was not given to a pass"
        self.close()
        self._is_finished = True
        samples = [microbatch.tokens.samples for microbatch in self._microbatches]
        problems = [*self._accounts().problems(samples)]
        problems += [problem for routers in self._routers.values() for problem in routers.problems()]
        if self._mode == "record":
            problems += self._recorded_otherwise(self._witness.checksums())
        checksums = self._sample_checksums(self._witness.checksums())
        if self._mode != "record":
            problems += self._mismatches(checksums)
        problems += self._witness.problems()
        refuse_anywhere(problems, RoutingError)
        compared = sum(int(microbatch.locations.has_routes_t.sum()) for microbatch in self._microbatches)
        current = sum(
            int((microbatch.locations.has_routes_t & microbatch.tokens.is_current_t).sum())
            for microbatch in self._microbatches
        )
        totals = route_accounts.world_totals(
            self._mesh,
            self._config.num_layers,
            layers=self.layers,
            changes_l4=self._changes_l4,
            expert_choices_2lE=self._choices_2lE,
            consumed_l=[account.consumed for account in self.accounts],
            is_changed_t=self._is_changed(),
            compared_tokens=compared if self._compares else 0,
            current_tokens=current if self._compares else 0,
            unknown_tokens=sum(self._num_tokens) - compared if self._compares else 0,
            cached_bytes=self._cache.num_bytes,
        )
        # The sums are equal on all ranks, so all ranks raise.
        if problems := list(totals.problems(_routed_layers(self._config))):
            raise RoutingError("; ".join(problems))
        if self._mode == "record":
            self._cache.set_checksums(self._version, checksums)
        self.totals = totals
        if self._compares:
            self.disjoint_by_sample = self._disjoint_by_sample()
        return totals.metrics(name, self._cache.top_k, compares=self._compares)

    def changed_tokens(self) -> Iterator[tuple[int, int]]:
        """Yield (sample, position) of this rank's tokens with a changed choice in a layer of this rank."""
        for microbatch in self._microbatches:
            if self._compares and microbatch.is_changed_t is not None:
                tokens, is_changed_t = microbatch.tokens, microbatch.is_changed_t.cpu()
                of_changed = (tokens.sample_index_t[is_changed_t], tokens.position_t[is_changed_t])
                for index, position in zip(*(column.tolist() for column in of_changed), strict=True):
                    yield tokens.samples[index], position

    def _start(self, mode: Literal["record", "impose", "observe"], *, compares: bool) -> Routing:
        """Collective over the world: check that the pass can run on every rank, and install the hooks."""
        assert self._mode == "unused", f"the tape was used to {self._mode}; another pass needs another tape"
        if mode == "record":
            problems = [
                f"sample {sample} of version {self._version} has been recorded already"
                for sample in self._samples
                if self._cache.checksum_of(self._version, sample) is not None
            ]
        else:
            problems = [problem for microbatch in self._microbatches for problem in microbatch.locations.problems]
        counts = Counter(self._samples).items()
        problems += [f"sample {sample} is in {count} microbatches" for sample, count in counts if count > 1]
        # Before the hooks: where one rank alone raised, the others would wait in the pass's collectives.
        refuse_anywhere(problems, RoutingError)
        self._mode, self._compares = mode, compares
        for routers in self._routers.values():
            routers.install()
        self._witness = Witness(
            list(self._routers),
            self._mesh,
            self._layouts,
            self.layers,
            self._cache.num_experts,
            partial(self._cache.missing_positions, self._version),
            seed=self._version,
            is_imposed=mode == "impose",
        )
        self._witness.install()
        return self._witness.around(self._armed)

    @contextmanager
    def _armed(self, chunk: nn.Module, index: int) -> Iterator[None]:
        routers, microbatch = self._routers[chunk], self._microbatches[index]
        in_chunk = self._in_chunk(chunk, index)
        with routers.forward(in_chunk):
            yield
        microbatch.num_chunks += 1
        # If routes are imposed, the witness's checksums suffice, except for drops, which it cannot observe.
        if self._mode != "impose" or self._has_drops:
            if microbatch.token_hashes_t is None:
                microbatch.token_hashes_t = self._token_hashes(microbatch, in_chunk)
            self._add_checksums(chunk, microbatch, in_chunk)
        self._add_changes(chunk, microbatch, in_chunk)
        # The backward pass only needs `imposed_ltK`.
        in_chunk.cached_ltK = in_chunk.scores_ltK = None
        if self._mode == "record":
            self._add_recorded(chunk, microbatch, in_chunk)

    def _in_chunk(self, chunk: nn.Module, index: int) -> ChunkMicrobatch:
        microbatch, columns = self._microbatches[index], self._columns[chunk]
        shape = (columns.stop - columns.start, len(microbatch.sample_index_t), self._cache.top_k)
        cached_ltK = is_live_t1 = None
        if self._compares:
            # The next microbatch's routes are copied while this microbatch is computed.
            begun = self._begun.pop((chunk, index), None) or self._begin_reading(index)
            cached_tLK = begun()
            if index + 1 < len(self._microbatches):
                self._begun[chunk, index + 1] = self._begin_reading(index + 1)
            # A damaged code must not stop the pass on a single rank: the checksum reports it on all ranks.
            in_range_tlK = cached_tLK[:, columns].clamp(0, self._cache.num_codes - 1)
            cached_ltK = in_range_tlK.transpose(0, 1).contiguous()
        imposes = self._mode == "impose"
        if imposes and not bool(microbatch.locations.has_routes_t.all()):
            is_live_t1 = ~microbatch.has_routes_t[:, None]
        return ChunkMicrobatch(
            index=index,
            num_experts=self._cache.num_experts,
            imposed_ltK=cached_ltK if imposes else None,
            is_live_t1=is_live_t1,
            live_ltK=torch.zeros(shape, dtype=self._cache.dtype, device=self._device),
            cached_ltK=cached_ltK,
            scores_ltK=torch.zeros(shape, device=self._device) if self._compares else None,
        )

    def _begin_reading(self, index: int) -> Callable[[], Tensor]:
        """Start copying a microbatch's cached codes `[t, L, K]` to the device; the returned function returns them."""
        read = self._compared_cache.read
        return self._ahead.begin(partial(read, self._microbatches[index].locations, self._device))

    def _token_hashes(self, microbatch: TapeMicrobatch, in_chunk: ChunkMicrobatch) -> Tensor:
        """Hash the token ids that the model received, so that routes of different tokens have different checksums."""
        assert in_chunk.ids_Bs is not None
        ids_t = routing_cache.router_order(in_chunk.ids_Bs, self._mesh)
        assert len(ids_t) == len(microbatch.sample_index_t), (
            f"microbatch {in_chunk.index} has {len(ids_t)} tokens here, its layout {len(microbatch.sample_index_t)}"
        )
        records = self._mode == "record"
        is_counted_t = microbatch.sample_index_t >= 0 if records else microbatch.has_routes_t
        position_t = to_device(microbatch.tokens.position_t, self._device)
        return route_accounts.token_hashes(ids_t, position_t, is_counted_t)

    def _add_checksums(self, chunk: nn.Module, microbatch: TapeMicrobatch, in_chunk: ChunkMicrobatch) -> None:
        routes_ltK = in_chunk.live_ltK if self._mode == "record" else in_chunk.cached_ltK
        assert routes_ltK is not None and microbatch.token_hashes_t is not None
        routes_Ktl = routes_ltK.permute(2, 1, 0)
        columns, num_samples = self._columns[chunk], len(microbatch.tokens.samples)
        labels = (microbatch.token_hashes_t, microbatch.sample_index_t, num_samples)
        hashes_lE = self._expert_hashes_lE[columns]
        if self._mode != "impose":
            self._code_checksums(microbatch)[:, columns] = route_accounts.route_checksums(
                routes_Ktl, hashes_lE, *labels
            )
        if self._has_drops and self._mode != "observe":
            if microbatch.drop_checksums_Nl is None:
                microbatch.drop_checksums_Nl = torch.zeros_like(self._code_checksums(microbatch))
            is_drop_E = torch.arange(self._cache.num_codes, device=self._device) >= self._cache.num_experts
            drops_Nl = route_accounts.route_checksums(routes_Ktl, hashes_lE * is_drop_E, *labels)
            microbatch.drop_checksums_Nl[:, columns] = drops_Nl

    def _add_changes(self, chunk: nn.Module, microbatch: TapeMicrobatch, in_chunk: ChunkMicrobatch) -> None:
        routers, columns = self._routers[chunk], self._columns[chunk]
        live_ltK, cached_ltK, scores_ltK = in_chunk.live_ltK, in_chunk.cached_ltK, in_chunk.scores_ltK
        if cached_ltK is None or scores_ltK is None or not routers.layers:
            return
        if routers.has_capacity:  # a choice counts as the same whether it was dropped or not
            live_ltK, cached_ltK = live_ltK % in_chunk.num_experts, cached_ltK % in_chunk.num_experts
        changed_Klt = route_accounts.changed_choices(live_ltK, cached_ltK, microbatch.has_routes_t)
        gates_Klt = live_gates(scores_ltK, live_ltK, routers.routers)
        moved_l = (gates_Klt * changed_Klt).sum((0, 2))
        disjoint_lt = changed_Klt.all(0) & microbatch.is_current_t
        missed_Klt = changed_Klt & microbatch.is_current_t
        changes_4l = [changed_Klt.sum((0, 2)), moved_l, missed_Klt.sum((0, 2)), disjoint_lt.sum(1)]
        self._changes_l4[columns] += torch.stack(changes_4l, 1)
        # Each layer counts into its own row of the flattened counts.
        first_l = torch.arange(columns.start, columns.stop, device=self._device) * self._cache.num_experts
        index_n = (live_ltK + first_l[:, None, None]).flatten()
        is_chosen_t1 = (microbatch.has_routes_t & microbatch.is_current_t)[:, None]
        for counts_lE, is_counted_ltK in zip(
            self._choices_2lE, (is_chosen_t1.expand_as(live_ltK), missed_Klt.permute(1, 2, 0)), strict=True
        ):
            counts_lE.view(-1).index_add_(0, index_n, is_counted_ltK.flatten().long())
        here_t = changed_Klt.flatten(0, 1).any(0)
        before_t = microbatch.is_changed_t
        microbatch.is_changed_t = here_t if before_t is None else before_t | here_t
        disjoint_t, before_t = disjoint_lt.sum(0), microbatch.disjoint_t
        microbatch.disjoint_t = disjoint_t if before_t is None else before_t + disjoint_t

    def _add_recorded(self, chunk: nn.Module, microbatch: TapeMicrobatch, in_chunk: ChunkMicrobatch) -> None:
        """Collect a microbatch's codes from each chunk; after the last chunk, add them to the cache."""
        if microbatch.recorded_tlK is None:
            shape = (len(microbatch.sample_index_t), len(self.layers), self._cache.top_k)
            microbatch.recorded_tlK = torch.zeros(shape, dtype=self._cache.dtype, device=self._device)
        microbatch.recorded_tlK[:, self._columns[chunk]] = in_chunk.live_ltK.transpose(0, 1)
        if microbatch.num_chunks == len(self._routers):
            self._cache.add_recorded(self._version, microbatch.tokens, microbatch.recorded_tlK)
            microbatch.recorded_tlK = None

    @property
    def _has_drops(self) -> bool:
        return self._cache.num_codes > self._cache.num_experts

    def _accounts(self) -> route_accounts.RouteAccounts:
        calls = {} if self._witness is None else self._witness.num_calls()
        return route_accounts.RouteAccounts(self.layers, self._num_tokens, calls)

    def _recorded_otherwise(self, used: Sequence[Tensor]) -> Iterator[str]:
        """Yield a sentence for each sample on this rank with recorded codes that differ from the experts used."""
        codes = [self._code_checksums(microbatch) for microbatch in self._microbatches]
        drops = [self._drop_checksums(microbatch) for microbatch in self._microbatches]
        is_wrong = [
            (code_Nl != used_Nl + drop_Nl).cpu() for code_Nl, used_Nl, drop_Nl in zip(codes, used, drops, strict=True)
        ]
        for index, (microbatch, is_wrong_Nl) in enumerate(zip(self._microbatches, is_wrong, strict=True)):
            for sample, is_wrong_l in zip(microbatch.tokens.samples, is_wrong_Nl, strict=True):
                if is_wrong_l.any():
                    yield (
                        f"layers {self._named(is_wrong_l)}, microbatch {index}, sample {sample} of version "
                        f"{self._version}: the recorded routes are not the experts that the routers used (checksum)"
                    )

    def _named(self, is_chosen_l: Tensor) -> list[int]:
        return [layer for layer, is_chosen in zip(self.layers, is_chosen_l.tolist(), strict=True) if is_chosen]

    def _sample_checksums(self, used: Sequence[Tensor]) -> dict[int, Tensor]:
        """Collective over the ranks that have parts of the same samples: return each whole sample's checksum `[l]`,
        from the checksums `[N, l]` of each microbatch's experts on this rank.
        """
        if self._mode == "observe":
            # Routing is live: check that the codes which it is compared with are the recorded codes.
            parts = [self._code_checksums(microbatch) for microbatch in self._microbatches]
        else:
            parts = [
                used_Nl + self._drop_checksums(microbatch)
                for used_Nl, microbatch in zip(used, self._microbatches, strict=True)
            ]
        empty = torch.zeros(0, len(self.layers), dtype=torch.int64, device=self._device)
        sums_Nl = torch.cat([empty, *parts])
        dist.all_reduce(sums_Nl, group=self._sharing)
        return dict(zip(self._samples, sums_Nl.cpu(), strict=True))

    def _code_checksums(self, microbatch: TapeMicrobatch) -> Tensor:
        """Return the checksums of a microbatch's codes on this rank; zeros for chunks that have not run it."""
        if microbatch.checksums_Nl is None:
            shape = (len(microbatch.tokens.samples), len(self.layers))
            microbatch.checksums_Nl = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return microbatch.checksums_Nl

    def _drop_checksums(self, microbatch: TapeMicrobatch) -> Tensor:
        if microbatch.drop_checksums_Nl is None:
            return torch.zeros_like(self._code_checksums(microbatch))
        return microbatch.drop_checksums_Nl

    def _mismatches(self, checksums: Mapping[int, Tensor]) -> Iterator[str]:
        what = "the routes" if self._mode == "observe" else "the experts that the routers used"
        for sample, checksum_l in checksums.items():
            expected_l = self._compared_cache.checksum_of(self._version, sample)
            if expected_l is not None and not torch.equal(checksum_l, expected_l):
                yield (
                    f"layers {self._named(checksum_l != expected_l)}, sample {sample} of version {self._version}: "
                    f"{what} are not the recorded ones of these tokens (checksum)"
                )

    def _is_changed(self) -> Tensor:
        """Return for each token of all microbatches whether its choice changed in any of this rank's layers, uint8."""
        is_changed = [
            torch.zeros(len(microbatch.sample_index_t), dtype=torch.bool, device=self._device)
            if microbatch.is_changed_t is None
            else microbatch.is_changed_t
            for microbatch in self._microbatches
        ]
        return torch.cat(is_changed).to(torch.uint8)

    def _disjoint_by_sample(self) -> dict[int, tuple[int, int]]:
        """Collective over the ranks that share samples: return disjoint and compared choices of each sample."""
        sums = [torch.zeros(0, 2, dtype=torch.int64, device=self._device)]
        for microbatch in self._microbatches:
            is_compared_t = microbatch.has_routes_t & microbatch.is_current_t
            index_t, disjoint_t = microbatch.sample_index_t, microbatch.disjoint_t
            if disjoint_t is None:
                disjoint_t = torch.zeros_like(index_t)
            both_t2 = torch.stack([disjoint_t, is_compared_t * len(self.layers)], 1)
            sums_N2 = both_t2.new_zeros(len(microbatch.tokens.samples), 2)
            sums.append(sums_N2.index_add_(0, index_t.clamp_min(0), both_t2) if len(sums_N2) else sums_N2)
        sums_N2 = torch.cat(sums)
        for group in (self._sharing, self._mesh.pp.group):
            dist.all_reduce(sums_N2, group=group)
        return dict(zip(self._samples, map(tuple, sums_N2.tolist()), strict=True))


def _columns(routers: Mapping[nn.Module, ChunkRouters]) -> tuple[dict[nn.Module, slice], tuple[int, ...]]:
    columns: dict[nn.Module, slice] = {}
    layers: list[int] = []
    for chunk, of_chunk in routers.items():
        columns[chunk] = slice(len(layers), len(layers) + len(of_chunk.layers))
        layers += of_chunk.layers
    assert layers == sorted(set(layers)), f"the chunks are not in the order of their layers: {layers}"
    return columns, tuple(layers)


def _routed_layers(config: TransformerConfig) -> list[bool]:
    frequency, num_layers = config.moe_layer_freq, config.num_layers
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(is_routed) for is_routed in frequency]
