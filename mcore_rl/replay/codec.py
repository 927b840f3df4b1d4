"""Routes as bytes: one for each expert of a token's layer, or two where there are more codes than a byte holds."""

from dataclasses import dataclass

import torch
from torch import Tensor

BYTE_CODES = 256


@dataclass(frozen=True, slots=True)
class RouteCodec:
    """Routes `[n, l, K]`, integers below `num_codes`, as `w` bytes for each token, `[n, w]`: layer by layer."""

    num_codes: int
    num_layers: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of codes: one byte for up to 256 of them, else two (signed: torch cannot index uint16)."""
        return torch.uint8 if self.num_codes <= BYTE_CODES else torch.int16

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's routes in all layers."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def of_layers(self, num_layers: int) -> "RouteCodec":
        """Return the encoding of routes in another number of layers."""
        return RouteCodec(self.num_codes, num_layers, self.top_k)

    def encode(self, codes_nlK: Tensor) -> Tensor:
        """Return codes of `dtype` as uint8 `[n, w]`, without a copy where they are contiguous."""
        shape = (len(codes_nlK), self.num_layers * self.top_k)
        return codes_nlK.reshape(shape).contiguous().view(torch.uint8)

    def decode(self, bytes_nw: Tensor) -> Tensor:
        """Return uint8 `[n, w]` as codes `[n, l, K]` of `dtype`, without a copy where it is contiguous."""
        shape = (len(bytes_nw), self.num_layers, self.top_k)
        return bytes_nw.contiguous().view(-1).view(self.dtype).view(shape)
