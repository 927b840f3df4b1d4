"""The cache of the native engine: keys and values of earlier positions, and the tokens of the step that reads them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class PrefillRows(NamedTuple):
    """Tokens of a step that are consecutive positions of one slot: the beginning of a completion's cache."""

    begin: int
    """Index of the first one among the step's tokens."""
    end: int
    """Index behind the last one."""
    slot: int
    """Index of the slot in the cache."""
    stop: int
    """Position behind the last one: after the step the slot holds this many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """The tokens of one step: one of each decoding slot 0 ... num_decode - 1, then prefills, then padding.

    Padding writes to the cache's last slot, which no token reads.
    """

    ids_T: Tensor
    """Token ids, int64."""
    slots_T: Tensor
    """Index of each token's slot, int64."""
    positions_T: Tensor
    """Position of each token in its slot, int64."""
    num_decode: int
    """Number of slots that get one token."""
    longest: int
    """Largest number of keys of a decoding slot, its new one included."""
    spans: tuple[PrefillRows, ...]
    """The prefills."""
    _visible: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def visible(self, window: int | None) -> Tensor:
        """Return which keys each decoding slot's query attends to, bool `[num_decode, 1, 1, longest]`.

        The mask is computed once for all layers with the same window.
        """
        if window not in self._visible:
            positions_L = torch.arange(self.longest, device=self.positions_T.device)
            behind_BL = self.positions_T[: self.num_decode, None] - positions_L
            seen_BL = behind_BL >= 0 if window is None else (behind_BL >= 0) & (behind_BL <= window)
            self._visible[window] = seen_BL[:, None, None]
        return self._visible[window]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer, and the step in progress."""

    keys: Tensor
    """Keys `[slots, S, G, D]` of G groups."""
    values: Tensor
    """Values `[slots, S, G, Dv]`."""
    step: StepTokens
    """Tokens that the layer is computing."""

    def write(self, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """Store the step's keys and values."""
        where = self.step.slots_T, self.step.positions_T
        self.keys[where], self.values[where] = key_TGD, value_TGD


class RotaryAt(nn.Module):
    """Replacement of a rotary embedding during a step: the rows of its table at the step's positions."""

    def __init__(self, table: Any, positions_T: Tensor) -> None:
        super().__init__()
        self._rows = rotary_rows(table, positions_T)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Return 0: Megatron asks for a length before it calls the embedding, which needs none here."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the embedding's rows at the step's positions, whatever length is asked for."""
        return self._rows


def rotary_rows(table: Any, positions_T: Tensor) -> Any:
    """Return the rows at `positions_T` of a rotary embedding's result: angles, or angles and a factor."""
    if isinstance(table, tuple):
        return table[0][positions_T], *table[1:]
    return table[positions_T]


@contextmanager
def attending_over(
    attentions: Sequence[Any], caches: Sequence[LayerCache], latent_table: Any
) -> Iterator[None]:
    """Let these self-attentions attend over the caches inside the context.

    Latent ones embed positions themselves: at the step's positions in `latent_table`, which is None for others.
    """
    replaced = []
    for attention, cache in zip(attentions, caches, strict=True):
        attention.core_attention.cache = cache
        if latent_table is not None:
            replaced.append(attention.rotary_pos_emb)
            attention.rotary_pos_emb = RotaryAt(latent_table, cache.step.positions_T)
    try:
        yield
    finally:
        for attention in attentions:
            attention.core_attention.cache = None
        for attention, rotary in zip(attentions, replaced, strict=False):
            attention.rotary_pos_emb = rotary
