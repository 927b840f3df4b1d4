"""Encoding of routes in few bytes: whole bytes, the bits of each index, or the rank of the set of experts."""

import functools
from dataclasses import dataclass
from itertools import pairwise
from math import comb

import torch
from torch import Tensor

from mcore_rl.config.replay import RouteEncoding

BYTE_CODES = 256
WORD_BITS = 56
"""Most bits of a word: shifted by up to seven, to the bit of a byte where it begins, it still is an int64."""
TOKENS_AT_ONCE = 4096
"""Tokens that are encoded or decoded at once: what is computed on the way takes ten times the bytes of the result."""


@dataclass(frozen=True, slots=True)
class RouteCodec:
    """Encoding of routes `[n, l, K]`, integers below `num_codes`, as `w` bytes for each token, `[n, w]`.

    The codes of a token in one layer are one word or several, and the words of all layers follow each other without a
    gap between their bits:

    - "bytes": no words; codes stay as they are, one byte each, or two above 256 codes.
    - "bits": a word is some codes side by side, each with the bits that an index needs.
    - "sets": a word is the rank of a set among all sets of its size (combinatorial number system): of the rising codes
      c_1 < ... < c_k it is the sum of binomial(c_i, i). The codes are decoded in rising order.
    """

    num_codes: int
    num_layers: int
    top_k: int
    encoding: RouteEncoding

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of decoded codes: one byte for up to 256 of them, else two (signed: torch cannot index uint16)."""
        return torch.uint8 if self.num_codes <= BYTE_CODES else torch.int16

    @property
    def bits(self) -> int:
        """Number of bits that a code needs."""
        return max(1, (self.num_codes - 1).bit_length())

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes of one encoded token, over all layers."""
        if self.encoding == "bytes":
            return self.num_layers * self.top_k * self.dtype.itemsize
        return -(-self.num_layers * sum(bits for _, bits in self._words()) // 8)

    def of_layers(self, num_layers: int) -> "RouteCodec":
        """Return the encoding of routes in another number of layers."""
        return RouteCodec(self.num_codes, num_layers, self.top_k, self.encoding)

    def encode(self, codes_nlK: Tensor) -> Tensor:
        """Encode codes as uint8 `[n, w]`, without a copy where whole bytes are stored.

        "sets" expects different codes in a token's layer; of equal ones something else is decoded.
        """
        if self.encoding == "bytes":
            shape = (len(codes_nlK), self.num_layers * self.top_k)
            return codes_nlK.reshape(shape).contiguous().view(torch.uint8)
        return torch.cat([self._encoded(part_nlK) for part_nlK in codes_nlK.split(TOKENS_AT_ONCE)])

    def decode(self, bytes_nw: Tensor) -> Tensor:
        """Decode uint8 `[n, w]` to codes `[n, l, K]` of `dtype`."""
        shape = (len(bytes_nw), self.num_layers, self.top_k)
        if self.encoding == "bytes":
            return bytes_nw.contiguous().view(-1).view(self.dtype).view(shape)
        return torch.cat([self._decoded(part_nw) for part_nw in bytes_nw.split(TOKENS_AT_ONCE)])

    def _encoded(self, codes_nlK: Tensor) -> Tensor:
        words = self._ranks(codes_nlK) if self.encoding == "sets" else self._side_by_side(codes_nlK)
        return self._packed(torch.stack(words, -1).view(len(codes_nlK), self.num_layers * len(words)))

    def _decoded(self, bytes_nw: Tensor) -> Tensor:
        words = self._words()
        codes_nlK = torch.empty(
            len(bytes_nw), self.num_layers, self.top_k, dtype=self.dtype, device=bytes_nw.device
        )
        words_nlW = self._unpacked(bytes_nw).view(len(bytes_nw), self.num_layers, len(words))
        for (slots, _), word_nl in zip(words, words_nlW.unbind(-1), strict=True):
            if self.encoding == "bits":
                for place, slot in enumerate(slots):
                    codes_nlK[..., slot] = (word_nl >> (place * self.bits)) & ((1 << self.bits) - 1)
                continue
            rest_nl = word_nl.contiguous()
            for place in reversed(range(len(slots))):
                code_nl, below_nl = _last_code(rest_nl, self.num_codes, place + 1)
                codes_nlK[..., slots[place]] = code_nl
                rest_nl = rest_nl - below_nl
        return codes_nlK

    def _words(self) -> list[tuple[range, int]]:
        """Return for each word of a layer the slots of K that it holds, and its bits."""
        num_words = 1
        while True:
            bounds = [self.top_k * index // num_words for index in range(num_words + 1)]
            slots = [range(*pair) for pair in pairwise(bounds)]
            bits = [self._bits_of(len(of_word)) for of_word in slots]
            if max(bits) <= WORD_BITS:
                return list(zip(slots, bits, strict=True))
            num_words += 1

    def _bits_of(self, num_slots: int) -> int:
        if self.encoding == "bits":
            return num_slots * self.bits
        return max(1, (comb(self.num_codes, num_slots) - 1).bit_length())

    def _side_by_side(self, codes_nlK: Tensor) -> list[Tensor]:
        codes_Kn = codes_nlK.permute(2, 0, 1).flatten(1).contiguous()
        values = []
        for slots, _ in self._words():
            value_n = torch.zeros(codes_Kn.shape[1], dtype=torch.int64, device=codes_nlK.device)
            for place, slot in enumerate(slots):
                value_n |= codes_Kn[slot].long() << (place * self.bits)
            values.append(value_n.view(codes_nlK.shape[:2]))
        return values

    def _ranks(self, codes_nlK: Tensor) -> list[Tensor]:
        # The place of a code in the rising order is the number of smaller ones: K^2 comparisons of long rows of bytes
        # take a fraction of the time of sorting short rows.
        codes_Kn = codes_nlK.permute(2, 0, 1).flatten(1).contiguous()
        words, device = self._words(), codes_nlK.device
        sums_wKc = torch.zeros(len(words), self.top_k, self.num_codes, dtype=torch.int64, device=device)
        for index, (slots, _) in enumerate(words):
            for place, slot in enumerate(slots):
                sums_wKc[index, slot] = _binomials(self.num_codes, place + 1, device)
        values = [torch.zeros(codes_Kn.shape[1], dtype=torch.int64, device=device) for _ in words]
        for code_n in codes_Kn:
            place_n = torch.zeros_like(code_n, dtype=torch.int16)
            for other_n in codes_Kn:
                place_n += other_n < code_n
            cell_n = place_n.int() * self.num_codes + code_n
            for value_n, sums_Kc in zip(values, sums_wKc, strict=True):
                value_n += sums_Kc.view(-1)[cell_n]
        return [value_n.view(codes_nlK.shape[:2]) for value_n in values]

    def _offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first bit of each of a token's `m` words, and its bits."""
        bits_m = torch.tensor([bits for _, bits in self._words()], device=device).repeat(self.num_layers)
        return bits_m.cumsum(0) - bits_m, bits_m

    def _packed(self, values_nm: Tensor) -> Tensor:
        first_m, bits_m = self._offsets(values_nm.device)
        bytes_nw = torch.zeros(
            len(values_nm), self.bytes_per_token, dtype=torch.uint8, device=values_nm.device
        )
        if not self.num_layers:
            return bytes_nw
        begin_w = 8 * torch.arange(self.bytes_per_token, device=values_nm.device)
        word_w = torch.searchsorted(first_m + bits_m, begin_w, right=True)
        # A byte takes bits of as many words as fit between two multiples of eight.
        most_words = (
            1 if int(bits_m.min()) % 8 == 0 == int(bits_m.max()) % 8 else 1 + -(-7 // int(bits_m.min()))
        )
        for index in range(most_words):
            of_word_w = (word_w + index).clamp_max(len(first_m) - 1)
            shift_w = first_m[of_word_w] - begin_w
            # Bits of a later word than the byte's last are shifted out of it; the last word is not taken twice.
            left_w = shift_w.clamp(0, 8).where(word_w + index < len(first_m), 8)
            byte_nw = (values_nm[:, of_word_w] >> (-shift_w).clamp(0, 63)) << left_w
            bytes_nw |= (byte_nw & 255).to(torch.uint8)
        return bytes_nw

    def _unpacked(self, bytes_nw: Tensor) -> Tensor:
        first_m, bits_m = self._offsets(bytes_nw.device)
        padded_nw = torch.nn.functional.pad(bytes_nw, (0, 8))
        byte_m8 = (first_m // 8)[:, None] + torch.arange(8, device=bytes_nw.device)
        words_nm = (
            padded_nw[:, byte_m8.view(-1)].view(len(bytes_nw), len(first_m), 8).view(torch.int64)[..., 0]
        )
        return (words_nm >> (first_m % 8)) & ((1 << bits_m) - 1)


@functools.cache
def _binomials(num_codes: int, size: int, device: torch.device) -> Tensor:
    """Return binomial(c, size) for each code c, int64."""
    return torch.tensor([comb(code, size) for code in range(num_codes)], device=device)


@functools.cache
def _nearby_codes(num_codes: int, size: int, device: torch.device) -> tuple[Tensor, int, int]:
    """Return a table that begins the search of `_last_code`; the shift and the offset that give the index into it."""
    shift = 52 - num_codes.bit_length()
    offset = (1023 << (52 - shift)) - 1
    bucket_b = torch.arange(offset, (1023 + WORD_BITS + 1) << (52 - shift), device=device)
    lowest_b = (bucket_b << shift).view(torch.float64).long()
    # A value above 2^53 may have been rounded up into its bucket: the table begins that much below.
    lowest_b -= lowest_b >> 52
    return torch.searchsorted(_binomials(num_codes, size, device), lowest_b, right=True) - 1, shift, offset


def _last_code(value_n: Tensor, num_codes: int, size: int) -> tuple[Tensor, Tensor]:
    """Return for each value the last code whose binomial(code, size) is not above it, and that binomial.

    A binary search is slow on a CPU: its branches cannot be foreseen. A table by the exponent and the first bits of the
    value as a float gives the code or the one before it.
    """
    sums_c = _binomials(num_codes, size, value_n.device)
    nearby_b, shift, offset = _nearby_codes(num_codes, size, value_n.device)
    code_n = nearby_b[((value_n.double().view(torch.int64) >> shift) - offset).clamp_min_(0)]
    code_n += sums_c[(code_n + 1).clamp_max_(num_codes - 1)] <= value_n
    code_n.clamp_max_(num_codes - 1)
    return code_n, sums_c[code_n]
