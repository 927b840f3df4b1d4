"""Routes are encoded in few bytes and decoded exactly."""

from bisect import bisect_right
from itertools import combinations
from math import comb, log2

import pytest
import torch

from mcore_rl.config.replay import RouteEncoding
from mcore_rl.replay.codec import TOKENS_AT_ONCE, WORD_BITS, RouteCodec, _last_code

SHAPES = [
    (2, 1),
    (8, 2),
    (9, 9),
    (60, 4),
    (64, 6),
    (128, 8),
    (256, 8),
    (257, 8),
    (384, 8),
    (512, 22),
    (2048, 8),
]


def random_codes(codec: RouteCodec, num_tokens: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(codec.num_codes)
    scores = torch.rand(num_tokens, codec.num_layers, codec.num_codes, generator=generator)
    scores[0, 0, -1] = 2.0
    return scores.topk(codec.top_k).indices.to(codec.dtype)


@pytest.mark.parametrize("encoding", ["bytes", "bits", "sets"])
@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
@pytest.mark.parametrize("num_layers", [1, 5])
def test_routes_come_out_as_they_went_in(
    num_experts: int, top_k: int, num_layers: int, encoding: RouteEncoding
) -> None:
    codec = RouteCodec(num_experts, num_layers, top_k, encoding)
    codes = random_codes(codec)
    rows = codec.encode(codes)
    assert rows.dtype == torch.uint8 and rows.shape == (17, codec.bytes_per_token)
    decoded = codec.decode(rows)
    assert decoded.dtype == codec.dtype and int(decoded.max()) == num_experts - 1
    assert torch.equal(decoded, codes.sort(-1).values if encoding == "sets" else codes)
    assert codec.decode(codec.encode(codes[:0])).shape == (0, num_layers, top_k)


@pytest.mark.parametrize(("num_codes", "top_k"), [(8, 3), (17, 2), (12, 6)])
def test_the_code_of_a_set_is_its_rank_among_all_sets(num_codes: int, top_k: int) -> None:
    """Every set of its size, in the order by the largest element first, has the next number."""
    sets = sorted(combinations(range(num_codes), top_k), key=lambda one: one[::-1])
    codec = RouteCodec(num_codes, 1, top_k, "sets")
    rows = codec.encode(torch.tensor(sets, dtype=torch.uint8).flip(-1)[:, None])
    numbers = sum(rows[:, byte].long() << (8 * byte) for byte in range(codec.bytes_per_token))
    assert torch.equal(torch.as_tensor(numbers), torch.arange(comb(num_codes, top_k)))
    assert codec.decode(rows)[:, 0].tolist() == [list(one) for one in sets]


@pytest.mark.parametrize(("num_codes", "size"), [(384, 8), (512, 6), (2048, 5), (64, 1), (300, 2)])
def test_a_rank_is_read_exactly_at_every_border(num_codes: int, size: int) -> None:
    """The largest ranks have 54 to 56 bits, more than the float that begins the search."""
    borders = [comb(code, size) for code in range(num_codes)]
    values = sorted({n + step for n in borders for step in range(-9, 10) if 0 <= n + step < 2**WORD_BITS})
    codes, sums = _last_code(torch.tensor(values), num_codes, size)
    expected = [bisect_right(borders, value) - 1 for value in values]
    assert codes.tolist() == expected and sums.tolist() == [borders[code] for code in expected]


def test_many_tokens_are_encoded_as_few_are() -> None:
    codec = RouteCodec(128, 3, 8, "sets")
    codes = random_codes(codec, TOKENS_AT_ONCE + 3)
    rows = codec.encode(codes)
    assert torch.equal(rows[-5:], codec.encode(codes[-5:]))
    assert torch.equal(codec.decode(rows), codes.sort(-1).values)


@pytest.mark.parametrize(
    ("num_experts", "num_layers", "top_k", "expected"),
    [
        (128, 48, 8, (384, 336, 246)),  # Qwen3-30B-A3B
        (128, 94, 8, (752, 658, 482)),  # Qwen3-235B-A22B
        (256, 58, 8, (464, 464, 356)),  # DeepSeek-V3
        (384, 60, 8, (960, 540, 405)),  # Kimi K2
        (512, 48, 10, (960, 540, 468)),  # Qwen3-Next: a set of ten would exceed a word, it is two of five
    ],
)
def test_bytes_per_token(
    num_experts: int, num_layers: int, top_k: int, expected: tuple[int, int, int]
) -> None:
    """An int64 for each of 48 layers and 8 experts takes 3072 bytes."""
    sizes = tuple(
        RouteCodec(num_experts, num_layers, top_k, encoding).bytes_per_token
        for encoding in ("bytes", "bits", "sets")
    )
    assert sizes == expected
    smallest = num_layers * log2(comb(num_experts, top_k)) / 8
    assert smallest <= sizes[2] <= smallest * (1.16 if top_k > 8 else 1.02)
