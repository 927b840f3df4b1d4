"""Replacements of parts of Megatron: each is a function of the original, named in table.py."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def without_fp8(init: Callable[..., None]) -> Callable[..., None]:
    """`CheckpointWithoutOutput.__init__` that treats a false `fp8` as None."""

    def __init__(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, fp8 or None, *args, **kwargs)

    return __init__


def copied_storage(_: Any) -> Callable[[], Callable[[torch.Tensor, torch.Tensor], None]]:
    """`_get_share_storage` that gives the tensors a copy of the storage."""

    def share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.untyped_storage().resize_(source.untyped_storage().size())
            target.untyped_storage().copy_(source.untyped_storage())

    return lambda: share_storage


def direct_queries_unnormed(fused_or_default: Callable[..., Any]) -> Callable[..., Any]:
    """The resolver of norms before projections, for which directly projected queries have none."""

    @functools.wraps(fused_or_default)
    def wrapped(self: Any, module: Any, name: str) -> Any:
        return module if name == "linear_q_proj" else fused_or_default(self, module, name)

    return wrapped


def own_gates(tensors: Callable[..., Any]) -> Callable[..., Any]:
    """`SelfAttention.get_query_key_value_tensors` with the gates of this rank's queries."""

    @functools.wraps(tensors)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = tensors(self, *args, **kwargs)
        sharing = self.world_size // self.config.num_query_groups
        if sharing <= 1 or len(found) != 4:
            return found
        query, key, value, gate = found
        return query, key, value, gate.chunk(sharing, 2)[self.pg_collection.tp.rank() % sharing]

    return wrapped


def only_tensors_saved(checkpointed_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`MultiTokenPredictionLayer._checkpointed_forward` that saves only tensors, and passes the rest on unchanged."""

    def wrapped(self: Any, forward: Callable[..., Any], **inputs: Any) -> Any:
        saved = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in inputs.items() if name not in saved}

        def of_saved(*tensors: torch.Tensor) -> Any:
            return forward(**dict(zip(saved, tensors, strict=True)), **others)

        return checkpointed_forward(self, of_saved, *saved.values())

    return wrapped


def permuted_without_waiting(permute: Callable[..., Any]) -> Callable[..., Any]:
    """`permute` that finds the rows of experts by sorting: a mask's true values are counted on the host.

    The rows, their order and the returned values are Megatron's.
    """

    @functools.wraps(permute)
    def wrapped(
        tokens: torch.Tensor,
        routing_map: torch.Tensor,
        probs: torch.Tensor | None = None,
        num_out_tokens: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
    ) -> Any:
        if fused or drop_and_pad or num_out_tokens is None:
            return permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
        by_expert = routing_map.bool().T.reshape(-1)
        # A stable sort leaves the true values in their order: by expert, then by token.
        chosen_N = by_expert.argsort(descending=True, stable=True)[:num_out_tokens]
        token_N = chosen_N % len(tokens)
        gates_N = None if probs is None else probs.T.reshape(-1)[chosen_N]
        return tokens.index_select(0, token_N), gates_N, token_N

    return wrapped


def rotated_without_waiting(rotate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`_apply_rotary_pos_emb_thd` that finds packed tokens' positions on the device, and rotates the row at once."""

    @functools.wraps(rotate)
    def wrapped(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        if args:
            return rotate(t, cu_seqlens, freqs, *args, **options)
        group = options.pop("cp_group")
        position_t = packed_positions(cu_seqlens, len(t), group.rank(), group.size(), len(freqs))
        embeddings = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
        rotated: torch.Tensor = embeddings._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1), freqs[position_t], **options
        )
        return rotated.squeeze(1)

    return wrapped


def packed_positions(
    cu_seqlens: torch.Tensor, num_tokens: int, rank: int, ranks: int, table_length: int
) -> torch.Tensor:
    """Return the row of Megatron's table of angles for each of a context-parallel rank's packed tokens, `[t]`.

    Args:
        cu_seqlens: cumulative lengths of the sequences on all ranks, `num_tokens * ranks` in sum.
        num_tokens: tokens of this rank: of each sequence the chunks `rank` and `2 * ranks - 1 - rank` of as many.
        rank: this rank.
        ranks: context-parallel ranks.
        table_length: rows of the table; a table as long as all sequences together counts through them.
    """
    index_t = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence_t = torch.searchsorted(cu_seqlens[1:] // ranks, index_t, right=True)
    begin_t = cu_seqlens[sequence_t]
    position_t = index_t - begin_t // ranks
    if ranks > 1:
        chunk_t = (cu_seqlens[sequence_t + 1] - begin_t) // (2 * ranks)
        skipped_t = torch.where(position_t < chunk_t, rank, 2 * ranks - 2 - rank) * chunk_t
        position_t = position_t + skipped_t
    return position_t + begin_t if table_length == num_tokens * ranks else position_t


def scaled_in_place(scale_tensors: Callable[..., None]) -> Callable[..., None]:
    """`local_multi_tensor_scale`, which makes a copy of every gradient that it clips."""

    def scale(
        chunk_size: int,
        noop_flag: torch.Tensor,
        tensor_lists: Sequence[list[torch.Tensor]],
        factor: float,
    ) -> None:
        sources, targets = tensor_lists
        if all(source is target for source, target in zip(sources, targets, strict=True)):
            torch._foreach_mul_(targets, factor)
        else:
            scale_tensors(chunk_size, noop_flag, tensor_lists, factor)

    return scale


def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather_into_tensor` or `reduce_scatter_tensor` that skips gloo's copies in a group of a single rank."""

    @functools.wraps(collective)
    def call(output: torch.Tensor, input: torch.Tensor, *, group: Any = None, **options: Any) -> Any:
        if dist.get_world_size(group) > 1:
            return collective(output, input, group=group, **options)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return None

    return call
