"""Caches of the native engine's layers, and the tokens of a generating step."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class PrefillRows(NamedTuple):
    """Tokens of a step that are consecutive positions of one slot: a part of a completion's prompt."""

    begin: int
    """Index of the first token among the step's tokens."""
    end: int
    """Index after the last token."""
    slot: int
    """Index of the slot in the cache."""
    stop: int
    """Position after the last token: the number of positions in the slot after the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """Tokens of one step: a token for each decoding slot 0 ... num_decode - 1, then prefills, then padding.

    Padding writes to the cache's last slot, which no token reads.
    """

    ids_T: Tensor
    """Token ids, int64."""
    slots_T: Tensor
    """Index of each token's slot, int64."""
    positions_T: Tensor
    """Position of each token in its slot, int64."""
    num_decode: int
    """Number of decoding slots, which get one token each."""
    longest: int
    """Largest number of keys in a decoding slot, including the new token's."""
    spans: tuple[PrefillRows, ...]
    """Prefills of the step."""
    _visible: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def visible(self, window: int | None) -> Tensor:
        """Return the mask of keys that each decoding slot's query attends to, bool `[num_decode, 1, 1, longest]`.

        The mask is computed once for all layers with the same window.
        """
        if window not in self._visible:
            positions_L = torch.arange(self.longest, device=self.positions_T.device)
            behind_BL = self.positions_T[: self.num_decode, None] - positions_L
            seen_BL = behind_BL >= 0 if window is None else (behind_BL >= 0) & (behind_BL <= window)
            self._visible[window] = seen_BL[:, None, None]
        return self._visible[window]


_NONE = torch.empty(0, dtype=torch.int64)
NO_TOKENS = StepTokens(ids_T=_NONE, slots_T=_NONE, positions_T=_NONE, num_decode=0, longest=0, spans=())
"""Value of a cache's `step` between steps."""


class LayerCache(Protocol):
    """A layer's state after the earlier positions of all slots, and the step in progress."""

    step: StepTokens
    """Tokens that the layer is computing, set for each step."""

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first `length` positions of the slot `source` to the slots `targets`."""


@dataclass(slots=True)
class KeyValueCache:
    """The cache of attention."""

    keys: Tensor
    """Keys `[slots, S, G, D]` of G groups."""
    values: Tensor
    """Values `[slots, S, G, Dv]`."""
    step: StepTokens = NO_TOKENS
    """Tokens that the layer is computing."""

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first `length` positions of the slot `source` to the slots `targets`."""
        self.keys[targets, :length] = self.keys[source, :length]
        self.values[targets, :length] = self.values[source, :length]
