"""Packed experts of published gpt-oss checkpoints are unpacked as in transformers, and as the format defines."""

import struct
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.convert.hf.quantization import unpack_mxfp4
from tests.conversion import assert_same, differing, exported, imported, read_hf, write_hf
from tests.hf_models import Tensors, oracle

WIDE = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
"""Whole blocks, three and two of them."""
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def closed_form(nibble: int, scale: int) -> float:
    """Sign, two bits of exponent with bias 1, one of mantissa; times 2 to the scale - 127."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-1.0) ** sign * value * 2.0 ** (scale - 127)


def test_every_value_at_every_scale_is_exact() -> None:
    nibbles = [n for first in range(0, 16, 2) for n in (first, first + 1)] * 2
    blocks = torch.tensor([nibbles[2 * i] | nibbles[2 * i + 1] << 4 for i in range(16)], dtype=torch.uint8)
    out = torch.empty(256, 32)
    unpack_mxfp4(out, blocks.expand(256, 1, 16), torch.arange(256, dtype=torch.uint8).unsqueeze(1))
    for scale in range(255):
        wanted = [min(max(closed_form(n, scale), -(2.0**128)), 2.0**128) for n in nibbles]
        exact = torch.tensor(wanted, dtype=torch.float64).float()
        assert torch.equal(out[scale].view(torch.int32), exact.view(torch.int32)), scale
    assert out[255].isnan().all()
    assert struct.pack("<f", float(out[127, 8])) == struct.pack("<f", -0.0)


def random_blocks(experts: int, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(112, 126, shape, dtype=torch.uint8, generator=generator)


def model() -> tuple[dict[str, object], Tensors, Tensors]:
    """config.json, the tensors as they are published, and what they stand for."""
    # Here, as it imports torch's compiler, which processes without this test do without.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = oracle("gpt_oss", **WIDE)
    stored: Tensors = {}
    meant: Tensors = {}
    for number, (name, tensor) in enumerate(sorted(theirs.tensors.items())):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            blocks, scales = random_blocks(experts, rows, columns, number)
            stored |= {name + "_blocks": blocks, name + "_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        else:
            stored[name] = meant[name] = tensor.bfloat16()
    return theirs.config | {"quantization_config": MXFP4, "dtype": "bfloat16"}, stored, meant


def test_packed_experts_are_those_of_transformers_bit_for_bit(tmp_path: Path) -> None:
    config, stored, meant = model()
    source = write_hf(tmp_path / "hf", config, stored, shards=3)
    checkpoint = imported(source, tmp_path / "ckpt")
    again = exported(checkpoint, tmp_path / "again", reference=source)
    assert_same(read_hf(again), meant)
    assert "quantization_config" not in (again / "config.json").read_text()
    assert differing(source, checkpoint) == [] and differing(source, again) == []
