"""Routes are encoded in few bytes and decoded exactly, from every store."""

import pytest
import torch

from mcore_rl.replay.storage import RouteCodec, RouteStorage

CPU = torch.device("cpu")


def random_codes(codec: RouteCodec, num_tokens: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(codec.num_codes)
    scores = torch.rand(num_tokens, codec.num_layers, codec.num_codes, generator=generator)
    codes = scores.topk(codec.top_k).indices
    codes[0, 0, 0] = codec.num_codes - 1
    return codes.to(codec.dtype)


@pytest.mark.parametrize("bit_pack", [False, True])
@pytest.mark.parametrize("num_experts", [8, 60, 64, 128, 256, 257, 384, 512, 2048])
def test_routes_come_out_as_they_went_in(num_experts: int, bit_pack: bool) -> None:
    codec = RouteCodec(num_experts, 5, 8, bit_pack)
    codes = random_codes(codec)
    rows = codec.encode(codes)
    assert rows.dtype == torch.uint8 and rows.shape == (17, codec.bytes_per_token)
    assert torch.equal(codec.decode(rows), codes)
    assert int(codec.decode(rows).max()) == num_experts - 1


def test_bytes_per_token_of_the_shape_of_qwen3_30b() -> None:
    """48 layers and 8 of 128 experts take 3072 bytes as int64."""
    assert RouteCodec(128, 48, 8, bit_pack=False).bytes_per_token == 384 == 3072 // 8
    assert RouteCodec(128, 48, 8, bit_pack=True).bytes_per_token == 336
    assert RouteCodec(256, 48, 8, bit_pack=False).bytes_per_token == 384
    assert RouteCodec(512, 48, 8, bit_pack=False).bytes_per_token == 768
    assert RouteCodec(512, 48, 8, bit_pack=True).bytes_per_token == 432


def test_no_token_is_no_row() -> None:
    codec = RouteCodec(128, 2, 8, bit_pack=True)
    assert codec.decode(codec.encode(random_codes(codec)[:0])).shape == (0, 2, 8)


@pytest.mark.parametrize("store", ["device", "pinned", "file"])
def test_rows_are_read_from_every_store(store, tmp_path) -> None:  # type: ignore[no-untyped-def]
    blocks = RouteStorage(store, None, tmp_path, CPU)
    rows = torch.arange(60, dtype=torch.uint8).view(12, 5)
    number = blocks.add(rows)
    rows.zero_()
    assert blocks.store_of(number) == store
    assert blocks.read(number, torch.tensor([3, 1]), CPU).tolist() == [
        [15, 16, 17, 18, 19],
        [5, 6, 7, 8, 9],
    ]


def test_what_is_beyond_the_budget_goes_to_the_next_slower_store(tmp_path) -> None:  # type: ignore[no-untyped-def]
    blocks = RouteStorage("device", 100, tmp_path / "routes", CPU)
    rows = torch.zeros(8, 6, dtype=torch.uint8)
    numbers = [blocks.add(rows) for _ in range(5)]
    assert [blocks.store_of(number) for number in numbers] == [
        "device",
        "device",
        "pinned",
        "pinned",
        "file",
    ]
    assert blocks.num_bytes == 5 * 48
    assert [path.stat().st_size for path in (tmp_path / "routes").iterdir()] == [48]
    for number in numbers:
        blocks.drop(number)
    assert blocks.num_bytes == 0 and not list((tmp_path / "routes").iterdir())
