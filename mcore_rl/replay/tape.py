"""The tape of routing replay: whose choice of experts each router takes in one pass, and what became of it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mcore_rl.errors import RoutingError
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.agree import refuse_anywhere
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.schedule import Routing
from mcore_rl.replay.accounts import Accounts, Changes, Counted, LayerAccount, changed, world_totals
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.checksums import expert_numbers, route_sums, token_weights
from mcore_rl.replay.layouts import Layout, LocalTokens, local_tokens, router_order
from mcore_rl.replay.router_hooks import Station, Visit, live_gates


@dataclass(slots=True)
class _Slot:
    """A microbatch on this rank, over all its chunks."""

    tokens: LocalTokens
    owner_t: Tensor
    """On the device, like all that follows."""
    known_t: Tensor
    weights_t: Tensor | None = None
    sums_Nl: Tensor | None = None
    """Checksums of this rank's part of its samples."""
    is_changed_t: Tensor | None = None
    codes_tlK: Tensor | None = None
    """Recorded."""
    num_chunks: int = 0
    """That have seen it."""


class RoutingTape:
    """Routes of one pass over `layouts`, this rank's microbatches: recorded into `cache`, imposed from it, or compared.

    Give one of `record`, `impose`, `observe` to `run_pass`, then `finish`. A router is told what to choose by chunk
    and microbatch, in recomputation too. Only the selection is imposed: the gates are the live router's dense scores
    at the imposed experts. Padding, tokens of which nothing is known, and multi-token-prediction layers are routed
    live. Megatron computes balance losses from the live scores and the live choice, not from the imposed one; the
    expert bias counts what experts worked on, so the imposed.

    What the live router would have chosen is compared with the routes of `against`, else of `cache`: see
    `routes/...` in METRICS. Nothing waits for the device before `finish`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        layouts: Sequence[Layout],
        cache: RoutingCache,
        version: int,
        against: RoutingCache | None = None,
    ) -> None:
        """Collective over the world. `version` is the policy's whose routes these are."""
        self._mesh, self._cache, self._version = mesh, cache, version
        self._known = against or cache
        self._stations = {chunk: Station(chunk) for chunk in chunks}
        self._columns, self.layers = _columns(self._stations)
        refuse_anywhere(
            [
                f"routers here are of layers {list(self.layers)}, the cache is of layers {list(store.layers)}"
                for store in (cache, self._known)
                if store.layers != self.layers
            ],
            RoutingError,
        )
        self._config = get_model_config(chunks[0])
        self._device = next(chunks[0].parameters()).device
        tokens = [local_tokens(layout, mesh) for layout in layouts]
        self._places = [self._known.find(version, part) for part in tokens]
        self._slots = [
            _Slot(part, self._on_device(part.owner_t), self._on_device(place.is_found_t))
            for part, place in zip(tokens, self._places, strict=True)
        ]
        self._numbers_lE = expert_numbers(self.layers, cache.num_codes, self._device)
        self._accounts = Accounts(self.layers, [int(part.is_real_t.sum()) for part in tokens])
        self._changes = Changes(len(self.layers), self._device)
        self._mode: Literal["unused", "record", "impose", "observe"] = "unused"
        self._compares = self._is_finished = False

    def __enter__(self) -> "RoutingTape":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        assert error is not None or self._is_finished, (
            "the accounts of the pass were not closed: call finish()"
        )

    def record(self) -> Routing:
        """Collective over the world; for `run_pass`: the first forward pass's choices are added to the cache."""
        return self._start("record", compares=self._known is not self._cache)

    def impose(self) -> Routing:
        """Collective over the world; for `run_pass`: routers choose what the cache says."""
        assert self._known is self._cache, "routes are imposed from the cache and compared with it"
        return self._start("impose", compares=True)

    def observe(self) -> Routing:
        """Collective over the world; for `run_pass`: routers choose for themselves, and are compared."""
        return self._start("observe", compares=True)

    @property
    def accounts(self) -> list[LayerAccount]:
        """Of this rank's layers and tokens, so far."""
        return self._accounts.by_layer()

    def close(self) -> None:
        """Every router chooses for itself again; `finish` does it too."""
        for station in self._stations.values():
            station.remove()

    def finish(self, name: str = "routes") -> list[Metric]:
        """Collective over the world, after the pass: `name`/... metrics, equal on all ranks.

        RoutingError on all ranks alike, naming layer and samples, unless every router took the routes of every
        microbatch once (and at most once more in recomputation), with the checksums of the record.
        """
        assert self._mode != "unused", "the tape was not given to a pass"
        self.close()
        self._is_finished = True
        sums = self._whole_sums()
        problems = [*self._accounts.problems([slot.tokens.samples for slot in self._slots])]
        if self._mode != "record":
            problems += self._mismatches(sums)
        refuse_anywhere(problems, RoutingError)
        totals = world_totals(self._counted(), self._config.num_layers, self._mesh)
        if orphans := list(totals.problems(_routed(self._config))):
            raise RoutingError("; ".join(orphans))
        if self._mode == "record":
            self._cache.seal(self._version, sums)
        return totals.metrics(name, self._cache.top_k, compares=self._compares)

    def _start(self, mode: Literal["record", "impose", "observe"], *, compares: bool) -> Routing:
        assert self._mode == "unused", f"the tape was used to {self._mode}; another pass needs another tape"
        if mode == "record":
            problems = [
                f"sample {sample} of version {self._version} has been recorded already"
                for slot in self._slots
                for sample in slot.tokens.samples
                if self._cache.sum_of(self._version, sample) is not None
            ]
        else:
            problems = [problem for place in self._places for problem in place.problems]
        counts = Counter(sample for slot in self._slots for sample in slot.tokens.samples)
        problems += [f"sample {n} is in {count} microbatches" for n, count in counts.items() if count > 1]
        refuse_anywhere(problems, RoutingError)
        self._mode, self._compares = mode, compares
        for station in self._stations.values():
            station.install()
        return self._armed

    @contextmanager
    def _armed(self, chunk: nn.Module, index: int) -> Iterator[None]:
        station, slot = self._stations[chunk], self._slots[index]
        visit = self._visit(chunk, index)
        with station.forward(visit):
            yield
        self._accounts.add(station.layers, visit)
        slot.num_chunks += 1
        if slot.weights_t is None:
            slot.weights_t = self._weights(slot, visit)
        self._settle(chunk, slot, visit)
        visit.known_ltK = visit.scores_ltK = None
        if self._mode == "record" and slot.num_chunks == len(self._stations):
            assert slot.codes_tlK is not None
            self._cache.add(self._version, slot.tokens, slot.codes_tlK)
            slot.codes_tlK = None

    def _visit(self, chunk: nn.Module, index: int) -> Visit:
        slot, columns = self._slots[index], self._columns[chunk]
        shape = (columns.stop - columns.start, len(slot.owner_t), self._cache.top_k)
        known_ltK = is_free_t1 = None
        if self._compares:
            known_tLK = self._known.read(self._places[index], self._device)
            # A damaged code must not stop the pass of one rank: the checksum tells all of them.
            in_range_tlK = known_tLK[:, columns].clamp(0, self._cache.num_codes - 1)
            known_ltK = in_range_tlK.transpose(0, 1).contiguous()
        imposes = self._mode == "impose"
        if imposes and not bool(self._places[index].is_found_t.all()):
            is_free_t1 = ~slot.known_t[:, None]
        return Visit(
            index=index,
            num_experts=self._cache.num_experts,
            imposed_ltK=known_ltK if imposes else None,
            known_ltK=known_ltK,
            is_free_t1=is_free_t1,
            live_ltK=torch.zeros(shape, dtype=self._cache.dtype, device=self._device),
            scores_ltK=torch.zeros(shape, device=self._device) if self._compares else None,
        )

    def _settle(self, chunk: nn.Module, slot: _Slot, visit: Visit) -> None:
        """Checksums, and changes, of one microbatch in one chunk."""
        columns, station = self._columns[chunk], self._stations[chunk]
        num, num_layers = len(slot.tokens.samples), len(self.layers)
        routes_ltK = visit.live_ltK if self._mode == "record" else visit.known_ltK
        assert routes_ltK is not None and slot.weights_t is not None
        if slot.sums_Nl is None:
            slot.sums_Nl = torch.zeros(num, num_layers, dtype=torch.int64, device=self._device)
        slot.sums_Nl[:, columns] = route_sums(
            routes_ltK, self._numbers_lE[columns], slot.weights_t, slot.owner_t, num
        )
        if self._mode == "record":
            if slot.codes_tlK is None:
                shape = (len(slot.owner_t), num_layers, self._cache.top_k)
                slot.codes_tlK = torch.zeros(shape, dtype=self._cache.dtype, device=self._device)
            slot.codes_tlK[:, columns] = visit.live_ltK.transpose(0, 1)
        if visit.known_ltK is None or visit.scores_ltK is None or not station.layers:
            return
        live_ltK, known_ltK = visit.live_ltK, visit.known_ltK
        if station.has_drops:
            live_ltK, known_ltK = live_ltK % visit.num_experts, known_ltK % visit.num_experts
        changed_Klt = changed(live_ltK, known_ltK, slot.known_t)
        self._changes.add(columns, changed_Klt, live_gates(visit.scores_ltK, live_ltK, station.routers))
        here_t = changed_Klt.flatten(0, 1).any(0)
        slot.is_changed_t = here_t if slot.is_changed_t is None else slot.is_changed_t | here_t

    def _weights(self, slot: _Slot, visit: Visit) -> Tensor:
        assert visit.ids_Bs is not None
        ids_t = router_order(visit.ids_Bs, self._mesh)
        assert len(ids_t) == len(slot.owner_t), (
            f"microbatch {visit.index} has {len(ids_t)} tokens here, its layout {len(slot.owner_t)}"
        )
        is_counted_t = slot.owner_t >= 0 if self._mode == "record" else slot.known_t
        return token_weights(ids_t, self._on_device(slot.tokens.position_t), is_counted_t)

    def _whole_sums(self) -> dict[int, Tensor]:
        """Collective over the ranks that hold parts of the same samples: the checksum `[l]` of each whole sample."""
        samples = [sample for slot in self._slots for sample in slot.tokens.samples]
        empty = torch.zeros(0, len(self.layers), dtype=torch.int64, device=self._device)
        sums_Nl = torch.cat([empty, *(slot.sums_Nl for slot in self._slots if slot.sums_Nl is not None)])
        if len(sums_Nl) < len(samples):  # a microbatch that was not run; the accounts tell which
            sums_Nl = torch.cat([sums_Nl, sums_Nl.new_zeros(len(samples) - len(sums_Nl), len(self.layers))])
        groups = self._mesh.groups
        dist.all_reduce(sums_Nl, group=groups.tp_cp if self._mesh.sequence_parallel else groups.cp)
        return dict(zip(samples, sums_Nl.cpu(), strict=True))

    def _mismatches(self, sums: dict[int, Tensor]) -> Iterator[str]:
        for sample, sum_l in sums.items():
            expected_l = self._known.sum_of(self._version, sample)
            if expected_l is not None and not torch.equal(sum_l, expected_l):
                wrong = [
                    layer
                    for layer, is_wrong in zip(self.layers, sum_l != expected_l, strict=True)
                    if is_wrong
                ]
                yield (
                    f"layers {wrong}, sample {sample} of version {self._version}: the routes are not the recorded ones "
                    "of these tokens (checksum)"
                )

    def _counted(self) -> Counted:
        compared = sum(int(place.is_found_t.sum()) for place in self._places) if self._compares else 0
        real = sum(self._accounts.num_tokens)
        changed_t = [
            torch.zeros(len(slot.owner_t), dtype=torch.bool, device=self._device)
            if slot.is_changed_t is None
            else slot.is_changed_t
            for slot in self._slots
        ]
        return Counted(
            layers=self.layers,
            sums_l2=self._changes.sums_l2,
            compared=compared,
            consumed_l=[account.consumed for account in self.accounts],
            is_changed_t=torch.cat(changed_t).to(torch.uint8),
            unknown=real - compared if self._compares else 0,
            cached_bytes=self._cache.num_bytes,
        )

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def _columns(stations: dict[nn.Module, Station]) -> tuple[dict[nn.Module, slice], tuple[int, ...]]:
    """Where each chunk's layers are among this rank's, and these."""
    columns: dict[nn.Module, slice] = {}
    layers: list[int] = []
    for chunk, station in stations.items():
        columns[chunk] = slice(len(layers), len(layers) + len(station.layers))
        layers += station.layers
    assert layers == sorted(set(layers)), f"chunks in an order that is not that of the layers: {layers}"
    return columns, tuple(layers)


def _routed(config: TransformerConfig) -> list[bool]:
    """For each layer of the model, whether it routes tokens to experts."""
    frequency, num_layers = config.moe_layer_freq, config.num_layers
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(routes) for routes in frequency]
