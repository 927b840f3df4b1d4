"""What a tape of routes asks of the place where they are kept (replay/cache.py has it)."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mcore_rl.replay.layouts import LocalTokens


class Found(Protocol):
    """Where the routes of one microbatch's tokens on this rank are."""

    @property
    def problems(self) -> Sequence[str]:
        """What is missing, in words; what may be missing is not named."""
        ...

    @property
    def is_found_t(self) -> Tensor:
        """bool `[t]`, on the CPU: false for padding, and for tokens of which nothing is known."""
        ...


Place = TypeVar("Place", bound=Found)


class RouteStore(Protocol[Place]):
    """Routes of samples, for the layers of this rank; codes are `dtype` and below `num_codes`."""

    layers: tuple[int, ...]
    num_experts: int
    num_codes: int
    top_k: int
    dtype: torch.dtype

    def find(self, version: int, tokens: LocalTokens) -> Place:
        """Where the routes of these tokens are."""
        ...

    def read(self, place: Place, device: torch.device) -> Tensor:
        """Codes `[t, l, K]`; anything where nothing was found."""
        ...

    def add(self, version: int, tokens: LocalTokens, codes_tlK: Tensor) -> None:
        """Keep the routes of these tokens."""
        ...

    def seal(self, version: int, sums: dict[int, Tensor]) -> None:
        """Keep the checksum `[l]` of each whole sample that was added."""
        ...

    def sum_of(self, version: int, sample: int) -> Tensor | None:
        """The checksum `[l]` of the whole sample; None: nothing is known of it."""
        ...

    @property
    def num_bytes(self) -> int:
        """That routes take."""
        ...
