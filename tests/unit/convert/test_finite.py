"""No conversion writes a value that is infinite or NaN: the tensor that it comes from is named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from mcore_rl.convert.megatron.model import KeyLayout
from mcore_rl.errors import CheckpointError
from tests.conversion import assert_same, changed, exported, imported, read_dist, read_hf, write_hf
from tests.hf_models import Tensors, oracle
from tests.unit.convert.test_fp8 import model as fp8_model
from tests.unit.convert.test_int4 import model as int4_model
from tests.unit.convert.test_layouts import relaid
from tests.unit.convert.test_mxfp4 import model as mxfp4_model
from tests.unit.convert.test_upcycling import upcycled

UP, GATE = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.weight"
NORM, BIAS = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
Model = tuple[dict[str, Any], Tensors]


def ending_in(value: float) -> Callable[[Tensor], Tensor]:
    """Make a copy whose last element has the value; of a tensor of one byte an element, the last byte."""

    def change(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.view(-1)[-1] = value
        return copy

    return change


def plain(dtype: torch.dtype = torch.float32, case: str = "deepseek_v3") -> Model:
    theirs = oracle(case)
    return theirs.config, {name: tensor.to(dtype) for name, tensor in theirs.tensors.items()}


def fp8_in_fp16() -> Model:
    config, stored, _ = fp8_model()
    return config | {"dtype": "float16"}, stored


NAN, INFINITE = float("nan"), float("inf")
IMPORTS: list[tuple[Callable[[], tuple[Any, ...]], str, float, dict[str, Any], str]] = [
    (plain, UP, NAN, {}, f"{UP} has 1 values .* Take another copy"),
    (
        *(plain, UP, 3.4e38, {"dtype": "bf16"}),
        rf"{UP} has 1 values .* as torch.bfloat16.* largest is 3.4e\+38: .*--dtype fp32",
    ),
    (fp8_in_fp16, UP + "_scale_inv", 1e4, {}, f"{UP} has .* as torch.float16.*--dtype fp32"),
    (mxfp4_model, FUSED + "_scales", 255, {}, f"{FUSED} has 32 values"),
]
"""The model, the tensor whose last element gets a value, the value, options, and the message."""
MORE_IMPORTS: list[tuple[Callable[[], tuple[Any, ...]], str, float, dict[str, Any], str]] = [
    (plain, UP, INFINITE, {}, f"{UP} has 1 values .* as torch.float32"),
    (plain, NORM, -INFINITE, {}, f"{NORM} has 1 values"),
    (lambda: plain(torch.bfloat16), UP, NAN, {}, f"{UP} has 1 values"),
    (lambda: plain(torch.float16), GATE, INFINITE, {}, f"{GATE} has 1 values"),
    (lambda: plain(torch.float64), "lm_head.weight", NAN, {}, "lm_head.weight has"),
    (plain, BIAS, NAN, {}, f"{BIAS} has 1 values"),
    (plain, "model.embed_tokens.weight", NAN, {}, "embed_tokens.weight"),
    (lambda: plain(torch.float64), NORM, -1e39, {"dtype": "fp32"}, rf"{NORM} has 1 values .* as torch.float32"),
    (fp8_model, UP + "_scale_inv", NAN, {}, f"{UP} has .* Take another copy"),
    (fp8_model, UP + "_scale_inv", 3e38, {}, f"{UP} has .* as torch.bfloat16"),
    (int4_model, UP + "_scale", INFINITE, {}, f"{UP} has .* Take another copy"),
]


@pytest.mark.parametrize(
    ("made", "name", "value", "options", "message"),
    [*IMPORTS, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_IMPORTS)],
)
def test_an_import_of_values_that_are_not_finite_is_refused_by_the_name_of_their_tensor(
    made: Callable[[], tuple[Any, ...]], name: str, value: float, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, tensors, *_ = made()
    source = write_hf(tmp_path / "hf", config, changed(tensors, {name: ending_in(value)}))
    with pytest.raises(CheckpointError, match=message):
        imported(source, tmp_path / "ckpt", **options)
    assert not list((tmp_path / "ckpt").iterdir())


def resaved(checkpoint: Path, folder: Path, key: str, value: float) -> Path:
    """Write a checkpoint anew by torch, as another program would, with another last element of a tensor."""
    tensors = changed(read_dist(checkpoint), {key: ending_in(value)})
    save(tensors, storage_writer=FileSystemWriter(str(folder)), no_dist=True)
    shutil.copy(checkpoint / "metadata.json", folder)
    return folder


FC1, ROUTER = "decoder.layers.mlp.experts.experts.linear_fc1.weight", "decoder.layers.mlp.router.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.mark.matrix("decoder.layers.mlp.experts.experts.linear_fc1.weight-3.4e+38")
@pytest.mark.parametrize("value", [NAN, INFINITE, 3.4e38])
@pytest.mark.parametrize("key", [FC1, ROUTER, QKV])
def test_an_export_names_the_tensor_of_the_checkpoint(value: float, key: str, tmp_path: Path) -> None:
    config, tensors = plain(case="qwen3_moe")
    source = write_hf(tmp_path / "hf", config, tensors)
    broken = resaved(imported(source, tmp_path / "ckpt"), tmp_path / "broken", key, value)
    options: dict[str, Any] = {"reference": source, "dtype": "bf16" if value == 3.4e38 else "keep"}
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} has 1 values that are infinite or NaN as"):
        exported(broken, tmp_path / "out", **options)
    if value == 3.4e38:  # the same in fp32 is written, to where nothing of the refused export is in the way
        exported(broken, tmp_path / "out", reference=source)
        return
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} has 1 values"):
        relaid(broken, tmp_path / "again", KeyLayout("local", "each"), source)


@pytest.mark.full
@pytest.mark.parametrize(("made", "kind"), [(fp8_model, "fp8"), (int4_model, "int4")])
def test_blocks_are_not_made_of_weights_that_are_not_finite(
    made: Callable[[], tuple[dict[str, Any], Tensors, Tensors]], kind: str, tmp_path: Path
) -> None:
    config, stored, _ = made()
    source = write_hf(tmp_path / "hf", config, stored)
    key = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    broken = resaved(imported(source, tmp_path / "ckpt"), tmp_path / "broken", key, NAN)
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} has 1 values"):
        exported(broken, tmp_path / "out", reference=source, quantize=kind)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_mixture_is_not_made_of_slices_that_become_infinite(tmp_path: Path) -> None:
    config, tensors = plain(torch.bfloat16, "llama")
    name = "model.layers.1.mlp.down_proj.weight"
    source = write_hf(tmp_path / "hf", config, changed(tensors, {name: ending_in(3e38)}))
    upcycled(source, tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"layers.1.*experts.1.w2.weight has 1 values"):
        upcycled(source, tmp_path / "moe", granularity=2, top_k=4)


@pytest.mark.full
def test_large_values_whose_sum_is_infinite_pass(tmp_path: Path) -> None:
    config, tensors = plain(torch.float16)
    tensors = {name: torch.full_like(tensor, 60000.0) for name, tensor in tensors.items()}
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if name.endswith("correction_bias")}
    source = write_hf(tmp_path / "hf", config, tensors)
    assert_same(read_hf(exported(imported(source, tmp_path / "ckpt"), tmp_path / "out", reference=source)), tensors)


@pytest.mark.full
def test_the_type_that_the_message_advises_holds_the_values(tmp_path: Path) -> None:
    config, stored = fp8_in_fp16()
    source = write_hf(tmp_path / "hf", config, changed(stored, {UP + "_scale_inv": ending_in(1e4)}))
    checkpoint = imported(source, tmp_path / "ckpt", dtype="fp32")
    assert all(tensor.isfinite().all() for tensor in read_dist(checkpoint).values())
    assert json.loads((checkpoint / "manifest.json").read_text())["kind"] == "import"
