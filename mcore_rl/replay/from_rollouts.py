"""The rollout engine's routes (R3): checked, and sent from the ranks that generated to those that train."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.errors import RoutingError
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.agree import refuse_anywhere
from mcore_rl.parallel.mesh import Axis, Mesh
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.checksums import expert_hashes, route_checksums, token_hashes
from mcore_rl.replay.exchange import OfferedRoutes, SharedRows
from mcore_rl.replay.layouts import MicrobatchLayout

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RolloutRoutes:
    """Routes that an engine returned for one sample, on the CPU."""

    tokens_T: Tensor
    """Ids of the tokens that enter the model in training: prompt and completion without the last token."""
    experts_TLK: Tensor
    """Experts of these tokens; L counts all layers of the model that have routers, or only those of this rank. A row
    of -1: the engine left this token out."""
    group: int | None = None
    """Group of completions of one prompt; None: none is known."""

    @property
    def has_routes_T(self) -> Tensor:
        """Mask of the tokens that have routes, bool `[T]`."""
        if not self.experts_TLK.is_signed():
            return torch.ones(len(self.experts_TLK), dtype=torch.bool)
        return (self.experts_TLK != -1).flatten(1).any(1)


def cache_rollout_routes(
    cache: RoutingCache,
    version: int,
    generated: Mapping[int, RolloutRoutes],
    layouts: Sequence[MicrobatchLayout],
    mesh: Mesh,
    *,
    leaves_repeated_out: bool = False,
) -> list[Metric]:
    """Collective over the world: cache what a pass over `layouts` needs of all ranks' `generated` routes.

    Each rank asks a data- or context-parallel peer that generated a sample for the positions that it trains on, in its
    own layers. Nothing is broadcast or gathered. Where completions of a group begin with the same tokens and routes, as
    with their prompt, these rows travel, and are kept, once.

    Args:
        cache: this rank's cache; its routes of `version` are replaced.
        version: policy version that generated.
        generated: routes of the samples that this rank's model generated, equal on the ranks of one model. A sample
            without routes is left out. Some tokens of a sample may have none (rows of -1).
        layouts: this rank's microbatches.
        mesh: the mesh that trains.
        leaves_repeated_out: whether tokens with the routes of the token before, in all layers of the model and although
            their ids differ, are left without routes.

    Returns:
        The share of tokens whose routes are those of the token before, equal on all ranks.

    Raises:
        RoutingError: on all ranks, when routes have a wrong shape, an expert out of range or one expert twice.
    """
    # Ranks of one tensor-parallel group have the same routes: each checks its share of the samples.
    of_rank = sorted(generated)[mesh.tp.rank :: mesh.tp.size]
    share = {sample: generated[sample] for sample in of_rank}
    refuse_anywhere(list(_problems(cache, share)), RoutingError)
    repeated = _repeated_tokens(generated, mesh, cache.device)
    repeated_fraction = _repeated_fraction(repeated, share, mesh, cache.device)
    if leaves_repeated_out:
        generated = _without_repeated(generated, repeated)
    # A sample of which no token has routes is like one that came without them.
    generated = {sample: routes for sample, routes in generated.items() if bool(routes.has_routes_T.any())}
    share = {sample: generated[sample] for sample in of_rank if sample in generated}
    checksums = _checksums(cache, sorted(generated), share, mesh.tp)
    shared = _shared_rows(generated)
    offered = {
        sample: _offer(cache, routes, checksums[sample], shared.get(sample))
        for sample, routes in generated.items()
    }
    cache.receive(version, offered, cache.needed_positions(layouts, mesh), mesh.dp_cp)
    return [repeated_fraction]


def _problems(cache: RoutingCache, generated: Mapping[int, RolloutRoutes]) -> Iterator[str]:
    allowed_num_layers = {len(cache.model_layers), len(cache.layers)}
    for sample, routes in generated.items():
        shape, num_tokens = tuple(routes.experts_TLK.shape), len(routes.tokens_T)
        has_shape = len(shape) == 3 and shape[0] == num_tokens and shape[2] == cache.top_k
        if not has_shape or shape[1] not in allowed_num_layers:
            yield (
                f"sample {sample}: the engine returned routes of shape {list(shape)}; expected {num_tokens} tokens, "
                f"{len(cache.model_layers)} layers and {cache.top_k} experts"
            )
            continue
        dtype = routes.experts_TLK.dtype
        if torch.iinfo(dtype).max < cache.num_experts - 1:
            yield (
                f"sample {sample}: the engine returned routes as {str(dtype).removeprefix('torch.')}, in which indices "
                f"of {cache.num_experts} experts wrap around"
            )
            continue
        position_n = routes.has_routes_T.nonzero()[:, 0]
        # A pipeline stage without experts has rows of no layer, in which nothing can be wrong.
        if not len(position_n) or not shape[1]:
            continue
        is_whole = len(position_n) == num_tokens
        layers = _given_layers(cache, routes)
        experts_nLK = routes.experts_TLK if is_whole else routes.experts_TLK[position_n]
        if int(experts_nLK.min()) < 0 or int(experts_nLK.max()) >= cache.num_experts:
            problem = "is out of range"
            is_wrong_nL = ((experts_nLK < 0) | (experts_nLK >= cache.num_experts)).any(-1)
        else:
            problem, is_wrong_nL = "appears twice", _has_duplicates(experts_nLK.to(cache.dtype))
        if is_wrong_nL.any():
            row, column = is_wrong_nL.nonzero()[0].tolist()
            chosen = experts_nLK[row, column].tolist()
            yield (
                f"sample {sample}, layer {layers[column]}, token {int(position_n[row])}: an expert in {chosen} "
                f"{problem} ({cache.num_experts} experts)"
            )


def _repeated_tokens(
    generated: Mapping[int, RolloutRoutes], mesh: Mesh, device: torch.device
) -> dict[int, Tensor]:
    """Collective over the pipeline stages: return for each sample whether each token but the first has another id than
    the one before, and its routes in all layers of the model, bool `[T - 1]`.
    """
    samples = sorted(generated)
    masks = [_is_repeated(generated[sample]) for sample in samples]
    is_repeated_n = torch.cat([torch.zeros(0, dtype=torch.bool), *masks]).to(torch.uint8).to(device)
    # A stage may have been given its own layers only, and a route is repeated when all layers are.
    dist.all_reduce(is_repeated_n, op=dist.ReduceOp.MIN, group=mesh.pp.group)
    of_samples = is_repeated_n.bool().cpu().split([len(mask) for mask in masks])
    return dict(zip(samples, of_samples, strict=True))


def _repeated_fraction(
    repeated: Mapping[int, Tensor], share: Mapping[int, RolloutRoutes], mesh: Mesh, device: torch.device
) -> Metric:
    """Collective over the world: return how many tokens have the routes of the token before, though another id."""
    counts_2 = torch.zeros(2, dtype=torch.int64)
    for sample, routes in share.items():
        is_new_T = routes.tokens_T[1:] != routes.tokens_T[:-1]
        counts_2 += torch.stack([repeated[sample].sum(), is_new_T.sum()])
    on_device_2 = counts_2.to(device)
    dist.all_reduce(on_device_2, group=mesh.world.group)
    num_repeated, num_tokens = on_device_2.tolist()
    return Metric("rollout_routes/repeated_fraction", num_repeated, max(1, num_tokens))


def _is_repeated(routes: RolloutRoutes) -> Tensor:
    """Return whether each token but the first has another id than the one before, and its routes in the layers that
    are given, bool `[T - 1]`.
    """
    is_new_T = routes.tokens_T[1:] != routes.tokens_T[:-1]
    if not routes.experts_TLK.shape[1]:
        return is_new_T  # a stage without experts, which leaves it to the others
    is_same_T = (routes.experts_TLK[1:] == routes.experts_TLK[:-1]).flatten(1).all(1)
    return is_new_T & is_same_T & routes.has_routes_T[1:]


def _without_repeated(
    generated: Mapping[int, RolloutRoutes], repeated: Mapping[int, Tensor]
) -> dict[int, RolloutRoutes]:
    """Return the routes without tokens that repeat those of the token before."""
    kept = {}
    for sample, routes in generated.items():
        if repeated[sample].any():
            experts_TLK = routes.experts_TLK.to(torch.int16, copy=True)
            experts_TLK[1:][repeated[sample]] = -1
            routes = RolloutRoutes(routes.tokens_T, experts_TLK, routes.group)
        kept[sample] = routes
    return kept


def _has_duplicates(experts_TLK: Tensor) -> Tensor:
    """Return which choices have an expert twice, bool `[T, L]`."""
    # Comparisons of long rows, of bytes up to 256 experts: sorting rows of K takes ten times as long.
    experts_KTL = experts_TLK.permute(2, 0, 1).contiguous()
    is_twice_TL = torch.zeros(experts_TLK.shape[:2], dtype=torch.bool)
    for index, experts_TL in enumerate(experts_KTL):
        for other_TL in experts_KTL[:index]:
            is_twice_TL |= experts_TL == other_TL
    return is_twice_TL


def _checksums(
    cache: RoutingCache, samples: Sequence[int], share: Mapping[int, RolloutRoutes], axis: Axis
) -> dict[int, Tensor]:
    """Collective over `axis`: return the checksum `[l]` of each sample in this rank's layers.

    It is made of what the engine returned, before layers or positions are cut out or sent, so that the tape finds a
    mistake in what follows. `share` are the samples that this rank computes.
    """
    checksums_Nl = torch.zeros(len(samples), len(cache.layers), dtype=torch.int64)
    for index, sample in enumerate(samples):
        if sample in share:
            routes, num_tokens = share[sample], len(share[sample].tokens_T)
            checksums_1L = route_checksums(
                # Tokens without routes (-1) are not counted.
                routes.experts_TLK.clamp_min(0).transpose(0, 1),
                expert_hashes(_given_layers(cache, routes), cache.num_codes, CPU),
                token_hashes(routes.tokens_T, torch.arange(num_tokens), routes.has_routes_T),
                torch.zeros(num_tokens, dtype=torch.int64),
                1,
            )
            checksums_Nl[index] = checksums_1L[0, _columns(cache, routes)]
    if axis.size > 1:
        on_device_Nl = checksums_Nl.to(cache.device)
        dist.all_reduce(on_device_Nl, group=axis.group)
        checksums_Nl = on_device_Nl.cpu()
    return dict(zip(samples, checksums_Nl, strict=True))


def _given_layers(cache: RoutingCache, routes: RolloutRoutes) -> tuple[int, ...]:
    is_whole = routes.experts_TLK.shape[1] == len(cache.model_layers)
    return cache.model_layers if is_whole else cache.layers


def _columns(cache: RoutingCache, routes: RolloutRoutes) -> list[int]:
    given_layers = _given_layers(cache, routes)
    return [given_layers.index(layer) for layer in cache.layers]


def _shared_rows(generated: Mapping[int, RolloutRoutes]) -> dict[int, SharedRows]:
    """Return the first positions that samples share, tokens and routes, with the first sample of their group.

    The stages of a pipeline may have been given other layers, and share other numbers of rows: each exchanges its own
    layers only.
    """
    givers: dict[int, int] = {}
    shared = {}
    for sample in sorted(generated):
        routes = generated[sample]
        if routes.group is None:
            continue
        giver = givers.setdefault(routes.group, sample)
        first, length = generated[giver], min(len(routes.tokens_T), len(generated[giver].tokens_T))
        if giver == sample:
            continue
        is_other_T = (routes.experts_TLK[:length] != first.experts_TLK[:length]).flatten(1).any(1)
        is_other_T |= routes.tokens_T[:length] != first.tokens_T[:length]
        num_positions = int(is_other_T.int().argmax()) if is_other_T.any() else length
        if num_positions:
            shared[sample] = SharedRows(giver, num_positions)
    return shared


def _offer(
    cache: RoutingCache, routes: RolloutRoutes, checksum_l: Tensor, shared: SharedRows | None
) -> OfferedRoutes:
    """Return the routes in this rank's layers, with the checksum of what the engine returned."""
    codes_TlK, has_routes_T = routes.experts_TLK[:, _columns(cache, routes)], routes.has_routes_T
    is_given_T = has_routes_T.clone()
    if shared is not None:
        is_given_T[: shared.num_positions] = False
    codes_nlK = (codes_TlK if is_given_T.all() else codes_TlK[is_given_T]).to(cache.dtype)
    return OfferedRoutes(
        num_tokens=len(codes_TlK),
        layers=cache.layers,
        position_n=is_given_T.nonzero()[:, 0],
        checksum_l=checksum_l,
        read=lambda index_n: codes_nlK[index_n],
        missing_n=(~has_routes_T).nonzero()[:, 0],
        shared=shared,
    )
