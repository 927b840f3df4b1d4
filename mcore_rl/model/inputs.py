"""A microbatch as this rank's model reads it: on its device, cut for context parallelism."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.model.layers.packed import PackedParams, packed_params
from mcore_rl.parallel.mesh import Axis
from mcore_rl.parallel.sequence import zigzag, zigzag_spans


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMicrobatch:
    """This rank's positions `s` of a microbatch `[B, s]`; `shape` is that of the whole, `[B, S]`."""

    shape: tuple[int, int]
    tokens_Bs: Tensor
    labels_Bs: Tensor
    loss_mask_Bs: Tensor
    position_ids_Bs: Tensor
    packed: PackedParams | None = None
    """Of packed rows, which are laid end to end: B is 1."""
    is_padding_Bs: Tensor | None = None
    """See Microbatch."""

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Keyword arguments of GPTModel.forward; with labels it returns losses `[B, s]`, else logits `[B, s, v]`."""
        inputs: dict[str, Any] = {
            "input_ids": self.tokens_Bs,
            "position_ids": self.position_ids_Bs,
            "attention_mask": None,
        }
        if self.packed is not None:
            inputs["packed_seq_params"] = self.packed
        if self.is_padding_Bs is not None:
            inputs["padding_mask"] = self.is_padding_Bs
        if with_labels:
            inputs |= {"labels": self.labels_Bs, "loss_mask": self.loss_mask_Bs}
        return inputs


def localize(microbatch: Microbatch, cp: Axis, device: torch.device) -> LocalMicrobatch:
    """The part of `microbatch` that this rank holds."""
    if microbatch.packed is not None:
        return _localize_packed(microbatch, microbatch.packed, cp, device)

    def mine(full_BS: Tensor) -> Tensor:
        return zigzag(full_BS, cp).to(device, non_blocking=True)

    rows, length = microbatch.tokens_BS.shape
    return LocalMicrobatch(
        shape=(rows, length),
        tokens_Bs=mine(microbatch.tokens_BS),
        labels_Bs=mine(microbatch.labels_BS),
        loss_mask_Bs=mine(microbatch.loss_mask_BS),
        position_ids_Bs=mine(microbatch.position_ids_BS),
    )


def _localize_packed(
    microbatch: Microbatch, spans: PackedSpans, cp: Axis, device: torch.device
) -> LocalMicrobatch:
    """Megatron takes one row of packed spans; each span is cut for context parallelism by itself."""
    lengths = tuple(spans.cu_seqlens.diff().tolist())
    total = microbatch.tokens_BS.numel()
    assert sum(lengths) == total, f"spans of {sum(lengths)} positions in rows of {total}"
    assert cp.size == 1 or not any(length % (2 * cp.size) for length in lengths), (lengths, cp.size)

    def mine(full_BS: Tensor) -> Tensor:
        return zigzag_spans(full_BS.reshape(1, -1), lengths, cp).to(device, non_blocking=True)

    is_padding_BS = microbatch.is_padding_BS
    return LocalMicrobatch(
        shape=(1, total),
        tokens_Bs=mine(microbatch.tokens_BS),
        labels_Bs=mine(microbatch.labels_BS),
        loss_mask_Bs=mine(microbatch.loss_mask_BS),
        position_ids_Bs=mine(microbatch.position_ids_BS),
        packed=packed_params(lengths, device),
        is_padding_Bs=None if is_padding_BS is None else mine(is_padding_BS),
    )
