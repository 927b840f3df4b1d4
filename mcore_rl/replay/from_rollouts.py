"""The rollout engine's routes, from the ranks that generated to those that train (R3)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.errors import RoutingError
from mcore_rl.parallel.agree import refuse_anywhere
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.checksums import expert_numbers, route_sums, token_weights
from mcore_rl.replay.exchange import Holding
from mcore_rl.replay.layouts import Layout

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RolloutRoutes:
    """Of one sample: the `T` tokens that enter the model in training, and the experts of each.

    The layers of experts_TLK are all of the model that have routers, or only those of this rank.
    """

    tokens_T: Tensor
    experts_TLK: Tensor


def fill(
    cache: RoutingCache,
    version: int,
    generated: Mapping[int, RolloutRoutes],
    layouts: Sequence[Layout],
    mesh: Mesh,
) -> None:
    """Collective over the world: `cache` then holds what a pass over `layouts` needs of all ranks' `generated`.

    The ranks of one model have the same samples in `generated`; replicas have different ones. Each rank asks the one
    data- and context-parallel peer that generated a sample for the positions that it trains, of its own layers.
    """
    refuse_anywhere(list(_wrong(cache, generated)), RoutingError)
    held = {sample: _holding(cache, routes) for sample, routes in generated.items()}
    cache.receive(version, held, cache.wants(layouts, mesh), mesh.dp_cp)


def _wrong(cache: RoutingCache, generated: Mapping[int, RolloutRoutes]) -> Iterator[str]:
    allowed = {len(cache.model_layers), len(cache.layers)}
    for sample, routes in generated.items():
        shape, num_tokens = tuple(routes.experts_TLK.shape), len(routes.tokens_T)
        if len(shape) != 3 or shape[0] != num_tokens or shape[1] not in allowed or shape[2] != cache.top_k:
            yield (
                f"sample {sample}: the engine gave routes {list(shape)}, of {num_tokens} tokens, "
                f"{len(cache.model_layers)} layers and {cache.top_k} experts wanted"
            )
            continue
        if routes.experts_TLK.dtype == torch.uint8 and cache.num_experts > 256:
            yield (
                f"sample {sample}: the engine gave routes in one byte, which wraps the numbers of "
                f"{cache.num_experts} experts"
            )
            continue
        experts_TLK = routes.experts_TLK.long()
        layers = cache.model_layers if shape[1] == len(cache.model_layers) else cache.layers
        is_out_TL = ((experts_TLK < 0) | (experts_TLK >= cache.num_experts)).any(-1)
        is_twice_TL = (experts_TLK.sort(-1).values.diff() == 0).any(-1)
        for is_wrong_TL, what in ((is_out_TL, "is out of range"), (is_twice_TL, "is there twice")):
            if is_wrong_TL.any():
                token, column = is_wrong_TL.nonzero()[0].tolist()
                chosen = experts_TLK[token, column].tolist()
                yield (
                    f"sample {sample}, layer {layers[column]}, token {token}: of experts {chosen} of "
                    f"{cache.num_experts} one {what}"
                )


def _holding(cache: RoutingCache, routes: RolloutRoutes) -> Holding:
    """This rank's layers; the checksum is of what the engine gave, before anything is cut from it."""
    is_whole = routes.experts_TLK.shape[1] == len(cache.model_layers)
    given = cache.model_layers if is_whole else cache.layers
    mine = [given.index(layer) for layer in cache.layers]
    codes_TLK = routes.experts_TLK.to(cache.dtype)
    num_tokens = len(codes_TLK)
    position_T, every_T = torch.arange(num_tokens), torch.ones(num_tokens, dtype=torch.bool)
    sums_1L = route_sums(
        codes_TLK.transpose(0, 1),
        expert_numbers(given, cache.num_codes, CPU),
        token_weights(routes.tokens_T, position_T, every_T),
        torch.zeros(num_tokens, dtype=torch.int64),
        1,
    )
    codes_TlK = codes_TLK[:, mine]
    return Holding(
        num_tokens=num_tokens,
        layers=cache.layers,
        position_n=position_T,
        sum_l=sums_1L[0, mine],
        read=lambda row_n: codes_TlK[row_n],
    )
