"""Routers of a model's chunks, by the index of their layer."""

from collections.abc import Iterator, Sequence

from megatron.core.transformer.moe.router import TopKRouter
from torch import nn


def routers(chunk: nn.Module) -> Iterator[tuple[int, TopKRouter]]:
    """Yield every router of a chunk with the index of its layer in the whole model; MTP layers come last."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            # Megatron counts layers from 1; since 0.19 routers of MTP layers have is_mtp_layer and count from 1 again.
            mtp_offset = module.config.num_layers if getattr(module, "is_mtp_layer", False) else 0
            yield module.layer_number - 1 + mtp_offset, module


def replayed_routers(chunk: nn.Module) -> list[tuple[int, TopKRouter]]:
    """Return the routers whose choices reach the logits, by layer; those of MTP layers affect their own loss only."""
    found = [(layer, router) for layer, router in routers(chunk) if layer < router.config.num_layers]
    return sorted(found, key=lambda pair: pair[0])


def routed_layers(chunks: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the indices of the layers in these chunks that have a router, without MTP layers."""
    return tuple(layer for chunk in chunks for layer, _ in replayed_routers(chunk))


def unfuse_routers(chunks: Sequence[nn.Module]) -> None:
    """Switch off fused routing for good: a fused kernel chooses experts where no replay can observe or impose them."""
    for chunk in chunks:
        for _, router in routers(chunk):
            router.config.moe_router_fusion = False
