"""The rollout engine's routes (R3): check them, and send them from the ranks that generated to the ranks that train."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.errors import RoutingError
from mcore_rl.megatron.agree import refuse_anywhere
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import to_device
from mcore_rl.metrics.metrics import Metric
from mcore_rl.replay.accounts import expert_hashes, route_checksums, token_hashes
from mcore_rl.replay.cache import MicrobatchLayout, RoutingCache
from mcore_rl.replay.exchange import OfferedRoutes, SharedRows, picked

ROUTE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes allowed for an engine's routes; torch cannot compare wider unsigned integers."""
BATCH_BYTES = 2**20
"""Largest size in bytes of the routes that are checked in one batch: for single short samples the calls would cost
more than the work, and above it a CPU spends more time on new memory than on routes.
"""


@dataclass(frozen=True, slots=True)
class RolloutRoutes:
    """Routes that an engine returned for one sample, on the CPU."""

    tokens_T: Tensor
    """Token ids that the model is trained on as input: prompt and completion without the last token."""
    experts_TLK: Tensor
    """Experts of these tokens, in all of the model's layers that have routers or only in this rank's. A row of -1 means
    that the engine returned no routes for the token."""
    group: int | None = None
    """Group of completions with the same prompt; None if unknown."""

    @property
    def has_routes_T(self) -> Tensor:
        """Mask of the tokens that have routes, bool `[T]`."""
        return _has_routes(self.experts_TLK)


@dataclass(frozen=True, slots=True)
class RouteBatch:
    """Concatenated routes of several samples: `n` tokens, on the cache's device."""

    samples: tuple[int, ...]
    sample_index_n: Tensor
    """Index into `samples` of each token's sample."""
    position_n: Tensor
    """Position of each token in its sample."""
    tokens_n: Tensor
    experts_nLK: Tensor
    """Experts as in `RolloutRoutes`, but 0 to K - 1 for tokens without routes."""
    has_routes_n: Tensor
    """Mask of the tokens that have routes, bool."""


def cache_rollout_routes(
    cache: RoutingCache,
    version: int,
    generated: Mapping[int, RolloutRoutes],
    layouts: Sequence[MicrobatchLayout],
    mesh: Mesh,
) -> list[Metric]:
    """Collective over the world: replace the cached routes of `version` by the `generated` routes, of all ranks, that a
    pass over `layouts` needs. Returns a metric: the share of tokens that repeat the previous token's routes.

    `generated` has the samples of this rank's model and is equal on the ranks of one model; tokens without routes have
    rows of -1, and a lost sample is absent. Leading rows that a group's completions have in common are sent and stored
    once. Raises RoutingError on all ranks if routes have a wrong shape, or an expert is out of range or chosen twice.
    """
    # The ranks of a tensor-parallel group have the same routes: each checks its share of the samples.
    samples = sorted(generated)
    share = {sample: generated[sample] for sample in samples[mesh.tp.rank :: mesh.tp.size]}
    problems, is_repeated_n, of_share_Nl = _checked(cache, share)
    refuse_anywhere(problems, RoutingError)
    repeated_fraction = _repeated_fraction(is_repeated_n, share, mesh)
    checksums_Nl = of_share_Nl.new_zeros(len(samples), len(cache.layers))
    checksums_Nl[mesh.tp.rank :: mesh.tp.size] = of_share_Nl
    dist.all_reduce(checksums_Nl, group=mesh.tp.group)
    checksums = dict(zip(samples, checksums_Nl.cpu(), strict=True))
    shared = _shared_rows(generated)
    offered = {
        sample: _offer(cache, routes, checksums[sample], shared.get(sample)) for sample, routes in generated.items()
    }
    cache.receive(version, offered, cache.needed_positions(layouts, mesh), mesh.dp_cp)
    return [repeated_fraction]


def _checked(cache: RoutingCache, generated: Mapping[int, RolloutRoutes]) -> tuple[list[str], Tensor, Tensor]:
    """Check the routes on the cache's device, with one wait. Returns a sentence for each sample with routes that cannot
    be imposed, the masks `_is_repeated` of all tokens, and the checksums of the samples in this rank's layers, int64,
    in ascending order. They are of the engine's routes before any selection of layers and positions, so that the tape
    detects mistakes in it.
    """
    formats = {sample: _problem_of_format(cache, routes) for sample, routes in generated.items()}
    problems = [
        f"sample {sample}: the engine returned routes {problem}" for sample, problem in formats.items() if problem
    ]
    batches: list[tuple[int, ...]] = []
    is_sound = [torch.ones(0, dtype=torch.bool, device=cache.device)]
    is_repeated = [torch.zeros(0, dtype=torch.bool, device=cache.device)]
    checksums = [torch.zeros(0, len(cache.layers), dtype=torch.int64, device=cache.device)]
    for batch in _batches({sample: generated[sample] for sample in generated if not formats[sample]}, cache.device):
        batches.append(batch.samples)
        # Long rows for each of the K experts: on a CPU rows of K take ten times as long.
        experts_KnL = batch.experts_nLK.permute(2, 0, 1).contiguous()
        # Every token has distinct, existing experts in each layer.
        are_experts = ~_has_duplicates(experts_KnL).any()
        if experts_KnL.numel():
            are_experts &= (experts_KnL.amin() >= 0) & (experts_KnL.amax() < cache.num_experts)
        is_sound.append(are_experts[None])
        is_repeated.append(_is_repeated(batch))
        checksums_bL = route_checksums(
            # Experts that do not exist are reported after the last batch.
            experts_KnL.clamp(0, cache.num_experts - 1),
            expert_hashes(_given_layers(cache, batch.experts_nLK), cache.num_codes, cache.device),
            token_hashes(batch.tokens_n, batch.position_n, batch.has_routes_n),
            batch.sample_index_n,
            len(batch.samples),
        )
        checksums.append(checksums_bL[:, _columns(cache, batch.experts_nLK)])
    for samples, sound in zip(batches, torch.cat(is_sound).tolist(), strict=True):
        for sample in () if sound else samples:
            problems += _problems_of_sample(cache, sample, generated[sample])
    return problems, torch.cat(is_repeated), torch.cat(checksums)


def _problem_of_format(cache: RoutingCache, routes: RolloutRoutes) -> str:
    shape, dtype, num_tokens = tuple(routes.experts_TLK.shape), routes.experts_TLK.dtype, len(routes.tokens_T)
    has_shape = len(shape) == 3 and shape[0] == num_tokens and shape[2] == cache.top_k
    if not has_shape or shape[1] not in (len(cache.model_layers), len(cache.layers)):
        return (
            f"of shape {list(shape)}; expected {num_tokens} tokens, {len(cache.model_layers)} layers and "
            f"{cache.top_k} experts"
        )
    name = str(dtype).removeprefix("torch.")
    if dtype not in ROUTE_DTYPES:
        return f"as {name}; indices of experts are integers: uint8, int8, int16, int32 or int64"
    if torch.iinfo(dtype).max < cache.num_experts - 1:
        return f"as {name}, in which indices of {cache.num_experts} experts wrap around"
    return ""


def _problems_of_sample(cache: RoutingCache, sample: int, routes: RolloutRoutes) -> Iterator[str]:
    position_n = routes.has_routes_T.nonzero()[:, 0]
    # On a pipeline stage without experts the rows have no layers, and nothing can be wrong.
    if not len(position_n) or not routes.experts_TLK.shape[1]:
        return
    layers, experts_nLK = _given_layers(cache, routes.experts_TLK), routes.experts_TLK[position_n]
    problem = "is out of range"
    is_wrong_nL = ((experts_nLK < 0) | (experts_nLK >= cache.num_experts)).any(-1)
    if not is_wrong_nL.any():
        problem, is_wrong_nL = "appears twice", _has_duplicates(experts_nLK.permute(2, 0, 1))
    if is_wrong_nL.any():
        row, column = is_wrong_nL.nonzero()[0].tolist()
        chosen = experts_nLK[row, column].tolist()
        yield (
            f"sample {sample}, layer {layers[column]}, token {int(position_n[row])}: an expert in {chosen} "
            f"{problem} ({cache.num_experts} experts)"
        )


def _has_routes(experts_nLK: Tensor) -> Tensor:
    if not experts_nLK.is_signed():
        return torch.ones(len(experts_nLK), dtype=torch.bool, device=experts_nLK.device)
    return (experts_nLK != -1).flatten(1).any(1)


def _batches(generated: Mapping[int, RolloutRoutes], device: torch.device) -> Iterator[RouteBatch]:
    """Yield the samples in ascending order, in batches of up to `BATCH_BYTES` with routes of the same format."""
    together: list[int] = []
    num_bytes, before = 0, None
    for sample in sorted(generated):
        experts_TLK = generated[sample].experts_TLK
        kind = experts_TLK.shape[1:], experts_TLK.dtype
        if together and (kind != before or num_bytes + experts_TLK.nbytes > BATCH_BYTES):
            yield _batch_of(generated, together, device)
            together, num_bytes = [], 0
        together.append(sample)
        num_bytes, before = num_bytes + experts_TLK.nbytes, kind
    if together:
        yield _batch_of(generated, together, device)


def _batch_of(generated: Mapping[int, RolloutRoutes], samples: Sequence[int], device: torch.device) -> RouteBatch:
    length_N = torch.tensor([len(generated[sample].tokens_T) for sample in samples])
    begin_N = length_N.cumsum(0) - length_N
    experts_nLK = to_device(torch.cat([generated[sample].experts_TLK for sample in samples]), device)
    position_n = torch.arange(len(experts_nLK)) - begin_N.repeat_interleave(length_N)
    has_routes_n = _has_routes(experts_nLK)
    if experts_nLK.is_signed():
        first_K = torch.arange(experts_nLK.shape[2], dtype=experts_nLK.dtype, device=device)
        experts_nLK = experts_nLK.where(has_routes_n[:, None, None], first_K)
    return RouteBatch(
        samples=tuple(samples),
        sample_index_n=to_device(torch.arange(len(samples)).repeat_interleave(length_N), device),
        position_n=to_device(position_n, device),
        tokens_n=to_device(torch.cat([generated[sample].tokens_T for sample in samples]), device),
        experts_nLK=experts_nLK,
        has_routes_n=has_routes_n,
    )


def _repeated_fraction(is_repeated_n: Tensor, share: Mapping[int, RolloutRoutes], mesh: Mesh) -> Metric:
    """Collective over the world: return the share of tokens after another id that repeat its routes in all layers."""
    is_repeated_n = is_repeated_n.to(torch.uint8)
    # A stage may only have routes of its own layers, and a token counts as repeated only if it is in all layers.
    dist.all_reduce(is_repeated_n, op=dist.ReduceOp.MIN, group=mesh.pp.group)
    num_tokens = sum(int((routes.tokens_T[1:] != routes.tokens_T[:-1]).sum()) for routes in share.values())
    counts_2 = torch.stack([is_repeated_n.sum(), torch.full_like(is_repeated_n[:1].sum(), num_tokens)])
    dist.all_reduce(counts_2, group=mesh.world.group)
    num_repeated, num_tokens = counts_2.tolist()
    return Metric("rollout_routes/repeated_fraction", num_repeated, max(1, num_tokens))


def _is_repeated(batch: RouteBatch) -> Tensor:
    """Mask `[n]`: True where a token is not the previous one of its sample but has its routes in these layers."""
    is_repeated_n = batch.position_n > 0
    is_repeated_n[1:] &= batch.tokens_n[1:] != batch.tokens_n[:-1]
    # A stage without experts leaves the decision to the other stages.
    if batch.experts_nLK.shape[1]:
        is_repeated_n &= batch.has_routes_n
        is_repeated_n[1:] &= (batch.experts_nLK[1:] == batch.experts_nLK[:-1]).flatten(1).all(1)
    return is_repeated_n


def _has_duplicates(experts_KTL: Tensor) -> Tensor:
    is_twice_TL = torch.zeros(experts_KTL.shape[1:], dtype=torch.bool, device=experts_KTL.device)
    for index, experts_TL in enumerate(experts_KTL):
        for other_TL in experts_KTL[:index]:
            is_twice_TL |= experts_TL == other_TL
    return is_twice_TL


def _given_layers(cache: RoutingCache, experts_nLK: Tensor) -> tuple[int, ...]:
    is_whole = experts_nLK.shape[1] == len(cache.model_layers)
    return cache.model_layers if is_whole else cache.layers


def _columns(cache: RoutingCache, experts_nLK: Tensor) -> list[int]:
    given_layers = _given_layers(cache, experts_nLK)
    return [given_layers.index(layer) for layer in cache.layers]


def _shared_rows(generated: Mapping[int, RolloutRoutes]) -> dict[int, SharedRows]:
    """Return the leading positions at which samples have the tokens and routes of the first sample of their group.
    Pipeline stages may share different numbers of rows, as each exchanges only its own layers.
    """
    givers: dict[int, int] = {}
    shared = {}
    for sample in sorted(generated):
        routes = generated[sample]
        if routes.group is None:
            continue
        giver = givers.setdefault(routes.group, sample)
        if giver == sample:
            continue
        first = generated[giver]
        num_positions = _num_equal(routes.tokens_T, first.tokens_T)
        num_positions = _num_equal(routes.experts_TLK[:num_positions], first.experts_TLK[:num_positions])
        if num_positions:
            shared[sample] = SharedRows(giver, num_positions)
    return shared


def _num_equal(rows: Tensor, others: Tensor) -> int:
    length = min(len(rows), len(others))
    is_other_T = (rows[:length] != others[:length]).view(length, -1).any(1) if length else torch.zeros(0)
    return int(is_other_T.int().argmax()) if is_other_T.any() else length


def _offer(cache: RoutingCache, routes: RolloutRoutes, checksum_l: Tensor, shared: SharedRows | None) -> OfferedRoutes:
    codes_TlK, has_routes_T = picked(routes.experts_TLK, _columns(cache, routes.experts_TLK)), routes.has_routes_T
    is_given_T = has_routes_T.clone()
    if shared is not None:
        is_given_T[: shared.num_positions] = False
    codes_nlK = (codes_TlK if is_given_T.all() else codes_TlK[is_given_T]).to(cache.dtype)
    return OfferedRoutes(
        num_tokens=len(codes_TlK),
        layers=cache.layers,
        position_n=is_given_T.nonzero()[:, 0],
        checksum_l=checksum_l,
        read=lambda index_n: codes_nlK.index_select(0, index_n),
        missing_n=(~has_routes_T).nonzero()[:, 0],
        shared=shared,
    )
