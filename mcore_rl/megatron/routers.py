"""Routers of a model's chunks, by the index of their layer, and their choice among groups of experts."""

from collections.abc import Iterator, Sequence

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def routers(chunk: nn.Module) -> Iterator[tuple[int, TopKRouter]]:
    """Yield every router of a chunk with the index of its layer in the whole model; MTP layers come last.

    A layer of GPTModel is attention and its experts. HybridModel, with two layers for these, needs its own rule here
    first.
    """
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            # Megatron counts layers from 1; since 0.19 routers of MTP layers have is_mtp_layer and count from 1 again.
            mtp_offset = module.config.num_layers if getattr(module, "is_mtp_layer", False) else 0
            yield module.layer_number - 1 + mtp_offset, module


def replayed_routers(chunk: nn.Module) -> list[tuple[int, TopKRouter]]:
    """Return the routers that influence the logits, by layer; routers of MTP layers affect their own loss only."""
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


def own_group_score(config: TransformerConfig) -> int | None:
    """Return the number of best experts that rank a group, where the model's family has another than Megatron."""
    best: int | None = getattr(config, "experts_in_group_score", None)
    return best


def best_in_groups(
    scores_TE: Tensor, top_k: int, *, num_groups: int, top_groups: int, experts_in_score: int
) -> tuple[Tensor, Tensor]:
    """Return the scores and the indices `[T, K]` of the best experts of each token's best groups.

    A group's score sums its best experts': one in DeepSeek-V2 (arXiv 2405.04434, section 2.2.2), two in DeepSeek-V3
    (arXiv 2412.19437, section 2.1.2). Megatron sums another number, top_k / top_groups.
    """
    scores_TGe = scores_TE.unflatten(1, (num_groups, -1))
    group_scores_TG = scores_TGe.topk(experts_in_score, dim=-1).values.sum(-1)
    chosen_TG = group_scores_TG.topk(top_groups, dim=-1, sorted=False).indices
    is_closed_TG = scores_TE.new_ones(group_scores_TG.shape).scatter(1, chosen_TG, 0.0).bool()
    open_TGe = scores_TGe.masked_fill(is_closed_TG[:, :, None], float("-inf"))
    scores_TK, experts_TK = open_TGe.flatten(1).topk(top_k, dim=-1)
    return scores_TK, experts_TK
