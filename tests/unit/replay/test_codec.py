"""Routes are encoded in few bytes and decoded exactly."""

import pytest
import torch

from mcore_rl.replay.codec import RouteCodec

SHAPES = [(2, 1), (8, 2), (9, 9), (128, 8), (256, 8), (257, 8), (384, 8), (512, 22), (2048, 8), (2**15, 3)]


@pytest.mark.parametrize(("num_codes", "top_k"), SHAPES)
@pytest.mark.parametrize("num_layers", [1, 5])
def test_routes_come_out_as_they_went_in(num_codes: int, top_k: int, num_layers: int) -> None:
    codec = RouteCodec(num_codes, num_layers, top_k)
    scores = torch.rand(17, num_layers, num_codes, generator=torch.Generator().manual_seed(num_codes))
    scores[0, 0, -1] = 2.0
    codes = scores.topk(top_k).indices.to(codec.dtype)
    rows = codec.encode(codes)
    assert rows.dtype == torch.uint8 and rows.shape == (17, codec.bytes_per_token)
    decoded = codec.decode(rows)
    assert decoded.dtype == codec.dtype and int(decoded.max()) == num_codes - 1
    assert torch.equal(decoded, codes)
    # As `transpose` leaves them.
    strided = codes.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(codec.decode(codec.encode(strided)), codes)
    assert codec.decode(codec.encode(codes[:0])).shape == (0, num_layers, top_k)


@pytest.mark.parametrize(
    ("num_experts", "num_layers", "top_k", "expected"),
    [
        (128, 48, 8, 384),  # Qwen3-30B-A3B
        (128, 94, 8, 752),  # Qwen3-235B-A22B
        (256, 58, 8, 464),  # DeepSeek-V3
        (384, 60, 8, 960),  # Kimi K2
        (512, 48, 10, 960),  # Qwen3-Next
    ],
)
def test_bytes_per_token(num_experts: int, num_layers: int, top_k: int, expected: int) -> None:
    """An int64 for each of 48 layers and 8 experts takes 3072 bytes."""
    assert RouteCodec(num_experts, num_layers, top_k).bytes_per_token == expected
