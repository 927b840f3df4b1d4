"""Keys and values of earlier positions, and the tokens of a step that attends over them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class PrefillRows(NamedTuple):
    """Tokens `begin` to `end` of a step: consecutive positions of `slot`, the last of them `stop - 1`."""

    begin: int
    end: int
    slot: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """The tokens `[T]` of one step: one of each of the slots 0 ... num_decode - 1, then spans, then padding.

    Padding has the cache's last slot, which nobody reads.
    """

    ids_T: Tensor
    slots_T: Tensor
    positions_T: Tensor
    num_decode: int
    longest: int
    """Keys of the decoding slot that has most, its new one included."""
    spans: tuple[PrefillRows, ...]
    _visible: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def visible(self, window: int | None) -> Tensor:
        """`[num_decode, 1, 1, longest]`: the keys that a decoding slot has, and that are inside its window."""
        if window not in self._visible:
            places_L = torch.arange(self.longest, device=self.positions_T.device)
            behind_BL = self.positions_T[: self.num_decode, None] - places_L
            seen_BL = behind_BL >= 0 if window is None else (behind_BL >= 0) & (behind_BL <= window)
            self._visible[window] = seen_BL[:, None, None]
        return self._visible[window]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys `[slots, S, G, D]` and values `[slots, S, G, Dv]`, and the step in progress."""

    keys: Tensor
    values: Tensor
    step: StepTokens

    def write(self, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """Keep the step's keys and values."""
        where = self.step.slots_T, self.step.positions_T
        self.keys[where], self.values[where] = key_TGD, value_TGD


class RotaryAt(nn.Module):
    """Stands in for a rotary embedding: the rows of its table at a step's positions, whatever length is asked for."""

    def __init__(self, table: Any, positions_T: Tensor) -> None:
        super().__init__()
        self._rows = rotary_rows(table, positions_T)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Unused: the positions are known."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Any:
        """What the embedding returns, at the positions."""
        return self._rows


def rotary_rows(table: Any, positions_T: Tensor) -> Any:
    """Rows of what a rotary embedding returned: angles, or those and a factor."""
    if isinstance(table, tuple):
        return table[0][positions_T], *table[1:]
    return table[positions_T]


@contextmanager
def attending_over(
    attentions: Sequence[Any], caches: Sequence[LayerCache], latent_table: Any
) -> Iterator[None]:
    """Inside, these self-attentions attend over the caches.

    Latent ones embed positions themselves: at the step's positions in `latent_table`.
    """
    kept = []
    for attention, cache in zip(attentions, caches, strict=True):
        attention.core_attention.cache = cache
        if latent_table is not None:
            kept.append(attention.rotary_pos_emb)
            attention.rotary_pos_emb = RotaryAt(latent_table, cache.step.positions_T)
    try:
        yield
    finally:
        for attention in attentions:
            attention.core_attention.cache = None
        for attention, rotary in zip(attentions, kept, strict=False):
            attention.rotary_pos_emb = rotary
