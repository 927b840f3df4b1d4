"""Encoding of routes: one byte for each expert of a token and layer, or two bytes if there are over 256 codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

BYTE_CODES = 256


@dataclass(frozen=True, slots=True)
class RouteCodec:
    """Encodes routes `[n, l, K]`, integers below `num_codes`, as bytes `[n, w]`, layer by layer."""

    num_codes: int
    num_layers: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of codes: uint8 for up to 256 codes, else int16 (torch cannot index uint16)."""
        return torch.uint8 if self.num_codes <= BYTE_CODES else torch.int16

    @property
    def bytes_per_token(self) -> int:
        """Size in bytes of a token's routes in all layers, w."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def of_layers(self, num_layers: int) -> "RouteCodec":
        """Return the same encoding for another number of layers."""
        return RouteCodec(self.num_codes, num_layers, self.top_k)

    def encode(self, codes_nlK: Tensor) -> Tensor:
        """Encode codes `[n, l, K]` of `dtype` as uint8 `[n, w]`; no copy is made if they are contiguous."""
        shape = (len(codes_nlK), self.num_layers * self.top_k)
        return codes_nlK.reshape(shape).contiguous().view(torch.uint8)

    def decode(self, bytes_nw: Tensor) -> Tensor:
        """Decode uint8 `[n, w]` to codes `[n, l, K]` of `dtype`; no copy is made if the bytes are contiguous."""
        shape = (len(bytes_nw), self.num_layers, self.top_k)
        return bytes_nw.contiguous().view(-1).view(self.dtype).view(shape)
