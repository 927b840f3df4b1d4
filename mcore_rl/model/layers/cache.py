"""A generating step of the native engine: its tokens, and what it asks of each layer's cache."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class PrefillRows(NamedTuple):
    """Tokens of a step that are consecutive positions of one slot: a part of a completion's prompt."""

    begin: int
    """Index of the first token among the step's tokens."""
    end: int
    slot: int
    stop: int
    """Position after the last token: the number of positions in the slot after the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """Tokens of one step: one for each decoding slot, then prefills, then padding, for a slot that none reads."""

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
    masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)
    """Masks of the keys that the decoding slots attend to, by window, which the first layer with a window adds."""


_NONE = torch.empty(0, dtype=torch.int64)
NO_TOKENS = StepTokens(ids_T=_NONE, slots_T=_NONE, positions_T=_NONE, num_decode=0, longest=0, spans=())
"""Value of a cache's `step` between steps."""


class LayerCache(Protocol):
    """A layer's state after the earlier positions of all slots, and the step in progress."""

    step: StepTokens
    """Tokens that the layer is computing, set for each step."""

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first `length` positions of the slot `source` to the slots `targets`."""
