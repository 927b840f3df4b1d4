"""The caches of the native engine, each kind by its layer, and the tokens of the step that reads them."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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


_NONE = torch.empty(0, dtype=torch.int64)
NO_TOKENS = StepTokens(ids_T=_NONE, slots_T=_NONE, positions_T=_NONE, num_decode=0, longest=0, spans=())
"""The step of a cache between steps."""


class LayerCache(Protocol):
    """A layer's state after the earlier positions of all slots, and the step in progress."""

    step: StepTokens
    """Tokens that the layer is computing, set for each step."""

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Give the first `length` positions of a slot to others."""


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
        """Give the first `length` positions of a slot to others."""
        self.keys[targets, :length] = self.keys[source, :length]
        self.values[targets, :length] = self.values[source, :length]
