"""Packed int4 experts of published Kimi-K2 folders are unpacked as the format defines."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.hf.quantization import unpack_int4
from tests.conversion import assert_same, differing, exported, imported, read_hf, write_hf
from tests.hf_models import Tensors, oracle

WIDE = {"hidden_size": 96, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2}
"""Whole blocks, three and two of them."""
WEIGHTS = {
    "actorder": None, "dynamic": False, "group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True,
    "type": "int",
}  # fmt: skip
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def unpacked(packed: Tensor, scales: Tensor) -> Tensor:
    """Number by number, with whole numbers of Python: the word's nibbles from the lowest, each less 8."""
    numbers = [
        [((word % 2**32 >> 4 * i) % 16 - 8) * scale_of_block[w // 4] for w, word in enumerate(words) for i in range(8)]
        for words, scale_of_block in zip(packed.tolist(), scales.tolist(), strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float64).bfloat16()


def random_blocks(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator).int()
    return packed, (torch.rand(rows, columns // 32, generator=generator) * 0.02 + 1e-3).bfloat16()


@cache
def model() -> tuple[dict[str, Any], Tensors, Tensors]:
    """config.json, the tensors as they are published, and what they stand for."""
    theirs = oracle("deepseek_v3", **WIDE)
    stored: Tensors = {}
    meant: Tensors = {}
    for number, (name, tensor) in enumerate(sorted(theirs.tensors.items())):
        if ".mlp.experts." in name:
            packed, scales = random_blocks(*tensor.shape, number)
            stored |= {
                name + "_packed": packed,
                name + "_scale": scales,
                name + "_shape": torch.tensor(tensor.shape, dtype=torch.int32),
            }
            meant[name] = unpacked(packed, scales)
        else:
            plain = tensor if name.endswith("correction_bias") else tensor.bfloat16()
            stored[name] = meant[name] = plain
    config = theirs.config | {"model_type": "kimi_k2", "quantization_config": INT4, "dtype": "bfloat16"}
    return config, stored, meant


def test_every_number_in_every_place_of_a_word() -> None:
    words = [value << 4 * place for place in range(8) for value in range(16)]
    packed = torch.tensor(words, dtype=torch.int64).sub(2**32 * torch.tensor([w >= 2**31 for w in words])).int()
    packed = packed.view(-1, 4)  # a block a row
    out, scales = (torch.empty(len(packed), 32, dtype=torch.bfloat16), torch.full((len(packed), 1), 0.25).bfloat16())
    unpack_int4(out, packed, scales)
    assert torch.equal(out, unpacked(packed, scales))
    assert out.min() == -2.0 and out.max() == 1.75


@pytest.mark.full
def test_packed_experts_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    config, stored, meant = model()
    source = write_hf(tmp_path / "hf", config, stored, shards=3)
    checkpoint = imported(source, tmp_path / "ckpt")
    again = exported(checkpoint, tmp_path / "again", reference=source)
    assert_same(read_hf(again), meant)
    assert "quantization_config" not in (again / "config.json").read_text()
    assert differing(source, checkpoint) == [] and differing(source, again) == []


@pytest.mark.full
def test_weights_that_no_step_has_moved_give_back_every_word(tmp_path: Path) -> None:
    config, stored, _ = model()
    source = write_hf(tmp_path / "hf", config, stored, shards=3)
    checkpoint = imported(source, tmp_path / "ckpt")
    again = exported(
        checkpoint, tmp_path / "again", CopySettings(workers=2, task_bytes=5_000), reference=source, quantize="int4"
    )
    assert_same(read_hf(again), stored)
    assert differing(source, again) == []
    assert (again / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.full
def test_moved_weights_are_the_nearest_numbers_of_the_references_scales(tmp_path: Path) -> None:
    config, stored, meant = model()
    source = write_hf(tmp_path / "hf", config, stored)
    generator = torch.Generator().manual_seed(3)
    moved = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if ".mlp.experts." in name
        else tensor
        for name, tensor in meant.items()
    }
    plain = write_hf(tmp_path / "plain", config | {"quantization_config": None}, moved)
    again = exported(imported(plain, tmp_path / "ckpt"), tmp_path / "again", reference=source, quantize="int4")
    found = read_hf(again)
    for name, tensor in moved.items():
        if ".mlp.experts." not in name:
            assert torch.equal(found[name], tensor)
            continue
        scales = stored[name + "_scale"]
        wide = scales.double().repeat_interleave(32, 1)
        numbers = (tensor.double() / wide).round().clamp(-8, 7)
        assert torch.equal(unpacked(found[name + "_packed"], scales), (numbers * wide).bfloat16())
        assert not torch.equal(found[name + "_packed"], stored[name + "_packed"])
