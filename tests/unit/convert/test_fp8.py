"""fp8 in blocks of 128 x 128 is dequantized exactly."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conversion import assert_same, differing, exported, imported, read_hf, write_hf
from tests.hf_models import Tensors, oracle

WIDE = {"hidden_size": 200, "moe_intermediate_size": 136, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2}
"""So that blocks are cut at both edges, and an expert has more than one."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
UNCONVERTED = ["gate", "e_score_correction_bias", "lm_head"]
MINIMAX_FP8 = FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": UNCONVERTED}
WIDE_MINIMAX = {"hidden_size": 200, "intermediate_size": 136, "num_hidden_layers": 2}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values and a scale a block."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.empty(rows, columns)
    values = torch.empty(weight.shape)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = weight[at] / scales[i, j]
    return values.to(torch.float8_e4m3fn), scales


def powers(scales: Tensor) -> Tensor:
    """The scales as powers of two, the next larger ones."""
    return torch.exp2(torch.log2(scales).ceil()).to(torch.float8_e8m0fnu)


def exact(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Element by element: the product in fp32, rounded to `dtype`."""
    result = torch.empty(values.shape, dtype=dtype)
    for i in range(0, values.shape[0], 128):
        for j in range(0, values.shape[1], 128):
            at = (slice(i, i + 128), slice(j, j + 128))
            result[at] = (values[at].float() * scales[i // 128, j // 128]).to(dtype)
    return result


def model(case: str = "deepseek_v3") -> tuple[dict[str, object], Tensors, Tensors]:
    """config.json, the tensors as DeepSeek and MiniMax publish them, and what they stand for."""
    theirs = oracle(case, **(WIDE_MINIMAX if case == "minimax_m2" else WIDE))
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in theirs.tensors.items():
        # The weights of an indexer's heads are not in 8 bits.
        if re.search(r"(?<!weights)(_proj|_proj_with_mqa|\.w[123]|\.wq_b|\.wk)\.weight$", name):
            values, scales = quantized(tensor)
            stored[name], stored[name + "_scale_inv"] = values, scales
            meant[name] = exact(values, scales)
        else:
            plain = tensor if name.endswith("correction_bias") else tensor.bfloat16()
            stored[name] = meant[name] = plain
    quantization = MINIMAX_FP8 if case == "minimax_m2" else FP8
    return theirs.config | {"quantization_config": quantization, "dtype": "bfloat16"}, stored, meant


@pytest.mark.matrix("deepseek_v32")
@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32", "minimax_m2"])
def test_blocks_equal_the_exact_product_rounded_once(case: str, tmp_path: Path) -> None:
    config, stored, meant = model(case)
    assert any(".experts." in name and name.endswith("_scale_inv") for name in stored)
    # Names are dealt out to shards in turn, so that scales lie in other files than their weights.
    source = write_hf(tmp_path / "hf", config, stored, shards=3)
    checkpoint = imported(source, tmp_path / "ckpt")
    again = exported(checkpoint, tmp_path / "again", reference=source)
    assert_same(read_hf(again), meant)
    assert differing(source, checkpoint) == []
    assert "quantization_config" not in (again / "config.json").read_text()


SCALE_TYPES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], dict[str, str]]] = {
    "bf16": (lambda scales: scales.bfloat16(), lambda stored: stored.float(), {}),
    "e8m0": (powers, lambda stored: stored.float(), {"scale_fmt": "ue8m0"}),
    "e8m0 as bytes": (
        lambda scales: powers(scales).view(torch.uint8),
        lambda stored: 2.0 ** (stored.float() - 127),
        {"scale_fmt": "ue8m0"},
    ),
}
"""Name: the scales as they are stored, what is stored as fp32 numbers, and what config.json says of it."""


@pytest.mark.full
@pytest.mark.parametrize("kind", SCALE_TYPES)
def test_scales_of_other_types_are_read_as_the_numbers_that_they_are(kind: str, tmp_path: Path) -> None:
    store, read, settings = SCALE_TYPES[kind]
    config, stored, meant = model()
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        stored[name] = store(stored[name])
        weight = name.removesuffix("_scale_inv")
        meant[weight] = exact(stored[weight], read(stored[name]))
    source = write_hf(tmp_path / "hf", config | {"quantization_config": FP8 | settings}, stored)
    again = exported(imported(source, tmp_path / "ckpt"), tmp_path / "again", reference=source)
    assert_same(read_hf(again), meant)


def test_ignored_scales_are_found(tmp_path: Path) -> None:
    config, stored, meant = model()
    source = write_hf(tmp_path / "hf", config, stored)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    cast = write_hf(tmp_path / "cast", config | {"quantization_config": None}, meant | {name: stored[name].bfloat16()})
    found = differing(source, imported(cast, tmp_path / "ckpt"))
    assert [difference.name for difference in found] == [name]
