"""The rollout engine's routes (R3): checked, and sent from the ranks that generated to those that train."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.errors import RoutingError
from mcore_rl.parallel.agree import refuse_anywhere
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.checksums import expert_hashes, route_checksums, token_hashes
from mcore_rl.replay.exchange import OfferedRoutes
from mcore_rl.replay.layouts import MicrobatchLayout

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RolloutRoutes:
    """Routes that an engine returned for one sample, on the CPU."""

    tokens_T: Tensor
    """Ids of the tokens that enter the model in training: prompt and completion without the last token."""
    experts_TLK: Tensor
    """Experts of these tokens; L counts all layers of the model that have routers, or only those of this rank."""


def cache_rollout_routes(
    cache: RoutingCache,
    version: int,
    generated: Mapping[int, RolloutRoutes],
    layouts: Sequence[MicrobatchLayout],
    mesh: Mesh,
) -> None:
    """Collective over the world: cache what a pass over `layouts` needs of all ranks' `generated` routes.

    Each rank asks a data- or context-parallel peer that generated a sample for the positions that it trains on, in its
    own layers. Nothing is broadcast or gathered.

    Args:
        cache: this rank's cache; its routes of `version` are replaced.
        version: policy version that generated.
        generated: routes of the samples that this rank's model generated, equal on the ranks of one model. A sample
            without routes is left out.
        layouts: this rank's microbatches.
        mesh: the mesh that trains.

    Raises:
        RoutingError: on all ranks, when routes have a wrong shape, an expert out of range or one expert twice.
    """
    refuse_anywhere(list(_problems(cache, generated)), RoutingError)
    offered = {sample: _offer(cache, routes) for sample, routes in generated.items()}
    cache.receive(version, offered, cache.needed_positions(layouts, mesh), mesh.dp_cp)


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
        if routes.experts_TLK.dtype == torch.uint8 and cache.num_experts > 256:
            yield (
                f"sample {sample}: the engine returned routes as uint8, in which indices of {cache.num_experts} "
                "experts wrap around"
            )
            continue
        experts_TLK = routes.experts_TLK.long()
        layers = cache.model_layers if shape[1] == len(cache.model_layers) else cache.layers
        is_out_TL = ((experts_TLK < 0) | (experts_TLK >= cache.num_experts)).any(-1)
        is_twice_TL = (experts_TLK.sort(-1).values.diff() == 0).any(-1)
        for is_wrong_TL, problem in ((is_out_TL, "is out of range"), (is_twice_TL, "appears twice")):
            if is_wrong_TL.any():
                token, column = is_wrong_TL.nonzero()[0].tolist()
                chosen = experts_TLK[token, column].tolist()
                yield (
                    f"sample {sample}, layer {layers[column]}, token {token}: an expert in {chosen} {problem} "
                    f"({cache.num_experts} experts)"
                )


def _offer(cache: RoutingCache, routes: RolloutRoutes) -> OfferedRoutes:
    """Return the routes in this rank's layers, with the checksum of what the engine returned."""
    is_whole = routes.experts_TLK.shape[1] == len(cache.model_layers)
    given_layers = cache.model_layers if is_whole else cache.layers
    columns = [given_layers.index(layer) for layer in cache.layers]
    codes_TLK = routes.experts_TLK.to(cache.dtype)
    num_tokens = len(codes_TLK)
    position_T, all_T = torch.arange(num_tokens), torch.ones(num_tokens, dtype=torch.bool)
    # Before anything is cut or sent, so that the tape would find a mistake in what follows.
    checksums_1L = route_checksums(
        codes_TLK.transpose(0, 1),
        expert_hashes(given_layers, cache.num_codes, CPU),
        token_hashes(routes.tokens_T, position_T, all_T),
        torch.zeros(num_tokens, dtype=torch.int64),
        1,
    )
    codes_TlK = codes_TLK[:, columns]
    return OfferedRoutes(
        num_tokens=num_tokens,
        layers=cache.layers,
        position_n=position_T,
        checksum_l=checksums_1L[0, columns],
        read=lambda index_n: codes_TlK[index_n],
    )
