"""Inputs of this rank's model: a microbatch on the device, split for context parallelism."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.batch import Microbatch
from mcore_rl.megatron.mesh import Axis
from mcore_rl.megatron.platform import to_device
from mcore_rl.megatron.vocab import zigzag, zigzag_spans
from mcore_rl.model.layers.attention import PackedParams, packed_params


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMicrobatch:
    """This rank's positions of a microbatch, `[B, s]`."""

    shape: tuple[int, int]
    """Shape `[B, S]` of the whole microbatch; packed sequences are concatenated, so B is 1."""
    tokens_Bs: Tensor
    """Token ids, int64."""
    labels_Bs: Tensor
    """Ids of the tokens to predict, int64."""
    loss_mask_Bs: Tensor
    """Loss weights, float32."""
    position_ids_Bs: Tensor
    """Positions for the rotary embedding, int64."""
    rows_N: Tensor
    """Positions with a loss, int64, of rows laid end to end. The host knows how many: a device would be waited for."""
    packed: PackedParams | None = None
    """Boundaries of packed sequences; None if each row is one sequence."""
    is_padding_Bs: Tensor | None = None
    """True at padding, bool; None without padding."""
    packed_spans: tuple[Tensor, int] | None = None
    """Index of each position's packed sequence, int64 `[s]`, -1 at padding, and the number of sequences; None if
    `packed` is None."""

    @property
    def routed_tokens(self) -> Tensor | int:
        """Number of positions on this rank that are not padding, a scalar."""
        return self.tokens_Bs.numel() if self.is_padding_Bs is None else (~self.is_padding_Bs).sum()

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Return the arguments of GPTModel.forward, for losses `[B, s]` with labels, else for logits `[B, s, v]`."""
        inputs: dict[str, Any] = {
            "input_ids": self.tokens_Bs,
            "position_ids": self.position_ids_Bs,
            # All attention is causal, as set by the mask type in the layers' specs.
            "attention_mask": None,
        }
        if self.packed is not None:
            inputs["packed_seq_params"] = self.packed
        if self.is_padding_Bs is not None:
            inputs["padding_mask"] = self.is_padding_Bs
        if with_labels:
            inputs |= {"labels": self.labels_Bs, "loss_mask": self.loss_mask_Bs}
        return inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicrobatch:
    """One packed sequence; objectives add fields of their own, and the model reads `inputs`."""

    inputs: LocalMicrobatch

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (1) and length of the packed sequence before context parallelism splits it."""
        return self.inputs.shape

    @property
    def routed_tokens(self) -> Tensor | int:
        """Number of positions on this rank that are not padding."""
        return self.inputs.routed_tokens

    @property
    def packed_spans(self) -> tuple[Tensor, int] | None:
        """Index of each position's sequence, -1 at padding, and the number of sequences."""
        return self.inputs.packed_spans

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Return the keyword arguments of a chunk's forward."""
        return self.inputs.model_inputs(with_labels=with_labels)


def localize(microbatch: Microbatch, cp: Axis, device: torch.device) -> LocalMicrobatch:
    """Return the part of `microbatch` that this rank's model reads; each packed sequence is split separately."""
    rows, length = microbatch.tokens_BS.shape
    packed: PackedParams | None = None
    lengths: tuple[int, ...] = ()
    if microbatch.packed is not None:
        # Megatron expects packed sequences in a single row.
        rows, length = 1, rows * length
        lengths = tuple(microbatch.packed.cu_seqlens.diff().tolist())
        assert sum(lengths) == length, f"sequences of {sum(lengths)} positions in rows of {length}"
        assert cp.size == 1 or not any(size % (2 * cp.size) for size in lengths), (lengths, cp.size)
        packed = packed_params(lengths, device)

    def cut(full_BS: Tensor) -> Tensor:
        rows_Bs = full_BS.reshape(1, -1) if lengths else full_BS
        if cp.size == 1:
            return rows_Bs
        return zigzag_spans(rows_Bs, lengths, cp) if lengths else zigzag(rows_Bs, cp)

    def local(full_BS: Tensor) -> Tensor:
        return to_device(cut(full_BS), device)

    is_padding_BS = microbatch.is_padding_BS
    packed_spans = None
    if lengths:
        spans_S = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        if is_padding_BS is not None:
            spans_S = spans_S.masked_fill(is_padding_BS.reshape(-1), -1)
        packed_spans = local(spans_S)[0], len(lengths)
    return LocalMicrobatch(
        shape=(rows, length),
        tokens_Bs=local(microbatch.tokens_BS),
        labels_Bs=local(microbatch.labels_BS),
        loss_mask_Bs=local(microbatch.loss_mask_BS),
        position_ids_Bs=local(microbatch.position_ids_BS),
        rows_N=to_device(cut(microbatch.loss_mask_BS).flatten().nonzero()[:, 0], device),
        packed=packed,
        packed_spans=packed_spans,
        is_padding_Bs=None if is_padding_BS is None else local(is_padding_BS),
    )
