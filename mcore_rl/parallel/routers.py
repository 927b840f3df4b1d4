"""The routers of a model's chunks, by the numbers of their layers."""

from collections.abc import Iterator, Sequence

from megatron.core.transformer.moe.router import TopKRouter
from torch import nn


def routers(chunk: nn.Module) -> Iterator[tuple[int, TopKRouter]]:
    """Every router of a chunk with its layer's number in the whole model, from 0; MTP layers come last."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            # Megatron counts from 1; since 0.19 the routers of MTP layers say so, and count from 1 again.
            mtp_offset = module.config.num_layers if getattr(module, "is_mtp_layer", False) else 0
            yield module.layer_number - 1 + mtp_offset, module


def replayed_routers(chunk: nn.Module) -> list[tuple[int, TopKRouter]]:
    """Those whose choices reach the logits, by rising layer: MTP layers have a loss of their own only."""
    found = [(layer, router) for layer, router in routers(chunk) if layer < router.config.num_layers]
    return sorted(found, key=lambda pair: pair[0])


def routed_layers(chunks: Sequence[nn.Module]) -> tuple[int, ...]:
    """The numbers, from 0, of the layers in these chunks that have a router; MTP layers left out."""
    return tuple(layer for chunk in chunks for layer, _ in replayed_routers(chunk))


def unfuse_routers(chunks: Sequence[nn.Module]) -> None:
    """From now on these chunks' routers choose by kernels of their own steps: the fused one asks nobody."""
    for chunk in chunks:
        for _, router in routers(chunk):
            router.config.moe_router_fusion = False
