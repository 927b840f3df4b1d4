"""fp8 blocks are written where the reference has them: unmoved blocks byte for byte, moved weights to half a unit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.copying.tensors import chunk_at, fill
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange
from tests.conversion import ONE_FILE, assert_same, changed, differing, exported, imported, read_hf, write_hf
from tests.hf_models import VOCAB
from tests.unit.convert.test_fp8 import FP8, SCALE_TYPES, model, powers, quantized
from tests.unit.convert.test_int4 import model as int4_model

UP = "model.layers.1.mlp.experts.3.up_proj.weight"
"""136 x 200: a whole block and three that the edges cut."""


@pytest.mark.matrix("deepseek_v32")
@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32", "minimax_m2"])
def test_weights_that_no_step_has_moved_give_back_every_byte(case: str, tmp_path: Path) -> None:
    config, stored, _ = model(case)
    source = write_hf(tmp_path / "hf", config, stored, shards=3)
    checkpoint = imported(source, tmp_path / "ckpt")
    settings = CopySettings(workers=2, task_bytes=50_000, shard_bytes=200_000)
    again = exported(checkpoint, tmp_path / "again", settings, reference=source, quantize="fp8")
    assert_same(read_hf(again), stored)
    assert differing(source, again) == []
    assert (again / "config.json").read_bytes() == (source / "config.json").read_bytes()
    index = json.loads((again / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys() and len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())


@pytest.mark.full
@pytest.mark.parametrize("kind", SCALE_TYPES)
def test_scales_of_other_types_come_back_as_they_were_stored(kind: str, tmp_path: Path) -> None:
    store, _, settings = SCALE_TYPES[kind]
    config, stored, _ = model()
    stored |= {name: store(scales) for name, scales in stored.items() if name.endswith("_scale_inv")}
    source = write_hf(tmp_path / "hf", config | {"quantization_config": FP8 | settings}, stored)
    again = exported(imported(source, tmp_path / "ckpt"), tmp_path / "again", reference=source, quantize="fp8")
    assert_same(read_hf(again), stored)


def half_units(values: Tensor) -> Tensor:
    """Half the distance of the e4m3 numbers around each value, float64: 3 bits of mantissa, and none below 2^-6."""
    exponents = values.abs().clamp(min=2.0**-6).log2().floor()
    return torch.exp2(exponents - 3) / 2


def largest_of_blocks(weight: Tensor) -> Tensor:
    """The largest magnitude of each block, block by block."""
    rows = [torch.stack([part.double().abs().max() for part in band.split(128, dim=1)]) for band in weight.split(128)]
    return torch.stack(rows)


@pytest.mark.matrix("bf16")
@pytest.mark.parametrize("kind", ["fp32", *SCALE_TYPES, "fp32 in powers"])
def test_moved_weights_are_the_nearest_numbers_of_scales_made_of_their_blocks(kind: str, tmp_path: Path) -> None:
    config, stored, meant = model()
    store, read, settings = SCALE_TYPES.get(kind, (lambda scales: scales, lambda scales: scales, {}))
    if kind == "fp32 in powers":
        settings = {"scale_fmt": "ue8m0"}
    reference = stored | {name: store(t) for name, t in stored.items() if name.endswith("_scale_inv")}
    source = write_hf(tmp_path / "hf", config | {"quantization_config": FP8 | settings}, reference)
    generator = torch.Generator().manual_seed(3)
    moved = {
        name: tensor if name.endswith("bias") else tensor * (1 + torch.rand(tensor.shape, generator=generator))
        for name, tensor in meant.items()
    }
    moved = {name: tensor.to(meant[name].dtype) for name, tensor in moved.items()}
    moved[UP][128:, 128:] = 0
    plain = write_hf(tmp_path / "plain", config | {"quantization_config": None}, moved)
    again = exported(imported(plain, tmp_path / "ckpt"), tmp_path / "again", reference=source, quantize="fp8")
    found = read_hf(again)
    assert found.keys() == reference.keys()
    for name, tensor in moved.items():
        assert found[name].dtype == reference[name].dtype
        if name + "_scale_inv" not in reference:
            assert torch.equal(found[name], tensor)
            continue
        assert found[name + "_scale_inv"].dtype == reference[name + "_scale_inv"].dtype
        scales = read(found[name + "_scale_inv"]).double()
        largest = largest_of_blocks(tensor)
        wanted = (largest / 448).float()
        wanted = read(store(powers(wanted).float() if settings else wanted)).double()
        assert torch.equal(scales[largest > 0], wanted[largest > 0])
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(tensor), : tensor.shape[1]]
        error = (found[name].double() * wide - tensor.double()).abs()
        # The quotient is rounded to fp32 before e4m3, which moves a tie by 2^-24 of it.
        assert (error <= half_units(tensor.double() / wide) * wide * (1 + 2.0**-19)).all(), name
    # A block of zeros alone keeps its scale.
    assert found[UP + "_scale_inv"][1, 1].float() == reference[UP + "_scale_inv"][1, 1].float()


@pytest.mark.full
def test_only_the_blocks_of_a_moved_weight_change(tmp_path: Path) -> None:
    config, stored, meant = model()
    source = write_hf(tmp_path / "hf", config, stored)
    moved = meant[UP].clone()
    moved[130, 5] = 2 * moved.abs().max()
    plain = write_hf(tmp_path / "plain", config | {"quantization_config": None}, meant | {UP: moved})
    again = exported(imported(plain, tmp_path / "ckpt"), tmp_path / "again", reference=source, quantize="fp8")
    found = read_hf(again)
    values, scales = quantized(moved.float())
    assert torch.equal(found[UP][128:, :128].float(), values[128:, :128].float())
    assert found[UP + "_scale_inv"][1, 0] == scales[1, 0] != stored[UP + "_scale_inv"][1, 0]
    found[UP][128:, :128] = stored[UP][128:, :128]
    found[UP + "_scale_inv"][1, 0] = stored[UP + "_scale_inv"][1, 0]
    assert_same(found, stored)


@pytest.mark.full
def test_any_rows_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    """Chunks of large tensors begin and end within blocks."""
    config, stored, meant = model()
    source = write_hf(tmp_path / "hf", config, stored)
    moved = {UP: meant[UP] * 1.7}
    plain = write_hf(tmp_path / "plain", config | {"quantization_config": None}, meant | moved)
    checkpoint = imported(plain, tmp_path / "ckpt")
    options = ExportOptions(reference=source, quantize="fp8")
    plan = plan_export(checkpoint, tmp_path / "again", options, ONE_FILE)
    opened = plan.open_source()
    (target,) = (target for target in plan.targets if target.name == UP)
    values, _ = quantized(moved[UP].float())
    for low, high in ((0, 136), (0, 7), (100, 131), (127, 128), (128, 136)):
        part = fill(chunk_at(target, (AxisRange(low, high), AxisRange(3, 150))), opened)
        assert torch.equal(part.float(), values[low:high, 3:150].float())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_blocks_without_a_reference_that_has_them_are_refused(kind: str, tmp_path: Path) -> None:
    config, stored, meant = int4_model() if kind == "fp8" else model()
    other = write_hf(tmp_path / "other", config, stored)
    plain = write_hf(tmp_path / "plain", config | {"quantization_config": None}, meant)
    checkpoint = imported(plain, tmp_path / "ckpt")
    for reference in (plain, other, None):
        with pytest.raises(CheckpointError, match=rf"in {kind} blocks, and --reference .* has none"):
            exported(checkpoint, tmp_path / "again", reference=reference, quantize=kind)


HEAD = "lm_head.weight"
HEAD_VALUES, HEAD_SCALES = quantized(torch.ones(VOCAB, 200))
FAULTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {UP + "_scale_inv": None}, "up_proj.weight_scale_inv is missing"),
    (
        {},
        {UP: torch.zeros(128, 200).to(torch.float8_e4m3fn), UP + "_scale_inv": torch.ones(1, 2)},
        r"up_proj.weight has shape \(128, 200\), the model wants \(136, 200\)",
    ),
    ({}, {HEAD: HEAD_VALUES, HEAD + "_scale_inv": HEAD_SCALES}, "lm_head.weight is fp8, which servers do not read"),
    (
        {"quantization_config": FP8 | {"modules_to_not_convert": ["lm_head", "up_proj"]}},
        {},
        "up_proj.weight is fp8, and modules_to_not_convert of config.json has up_proj",
    ),
    ({"quantization_config": None}, {}, "has tensors in fp8 blocks, and its config.json has quantization_config None"),
    ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, {}, "quantization_config .*fbgemm"),
]
"""Changes of config.json and of tensors, and the message."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import of the model."""
    config, stored, _ = model()
    folder = tmp_path_factory.mktemp("imported")
    return imported(write_hf(folder / "hf", config, stored), folder / "ckpt")


@pytest.mark.full
@pytest.mark.parametrize(("settings", "changes", "message"), FAULTS, ids=[message for *_, message in FAULTS])
def test_a_reference_that_contradicts_itself_or_the_model_is_refused(
    checkpoint: Path, settings: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, stored, _ = model()
    reference = write_hf(tmp_path / "reference", config | settings, changed(stored, changes))
    with pytest.raises(CheckpointError, match=message):
        exported(checkpoint, tmp_path / "again", reference=reference, quantize="fp8")
    assert not (tmp_path / "again").exists()
