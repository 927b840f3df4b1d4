"""Every fault of a converted checkpoint is found, however small it is."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.storage.checkpoint import read_marker, write_marker
from tests.conversion import changed, differing, imported, saved, with_mtp, write_hf
from tests.hf_models import Tensors, oracle
from tests.unit.convert.conftest import Converted
from tests.unit.convert.test_int4 import model as int4_model
from tests.unit.convert.test_mxfp4 import model as mxfp4_model
from tests.unit.model.test_logits_equal_transformers import WRONG_CONFIGS, WRONG_TENSORS, swap, with_

NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


def flipped(tensor: Tensor) -> Tensor:
    """One bit of one of all values."""
    copy = tensor.clone()
    copy.view(torch.int32)[3, 5] ^= 1
    return copy


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a flipped bit": (lambda t: changed(t, {UP: flipped}), "1 of 1152 values differ"),
    "another type": (lambda t: changed(t, {ROUTER: Tensor.bfloat16}), "torch.float32 and torch.bfloat16"),
    "minus zero": (lambda t: changed(t, {NORM: -torch.zeros(48)}), "48 of 48 values differ"),
    "two experts swapped": (lambda t: swap(t, "1.mlp.experts.2.", "1.mlp.experts.5."), "1152 of 1152 values differ"),
}


@pytest.mark.matrix("another type")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_changed_tensor_is_found_in_any_pair_of_formats(fault: str, tmp_path: Path) -> None:
    theirs = oracle("qwen3_moe")
    change, message = FAULTS[fault]
    zero = {NORM: torch.zeros(48)} if fault == "minus zero" else {}
    tensors = theirs.tensors | zero
    right = write_hf(tmp_path / "right", theirs.config, tensors)
    # An expert's tensor is not alone in Megatron's: only all of one type can be converted.
    wrong_tensors = {name: t.float() if fault != "another type" else t for name, t in change(tensors).items()}
    wrong = write_hf(tmp_path / "wrong", theirs.config, wrong_tensors)
    assert message in str(differing(right, wrong))
    if fault != "another type":
        checkpoint = imported(wrong, tmp_path / "ckpt")
        assert message in str(differing(right, checkpoint)) and message in str(differing(checkpoint, right))
        assert differing(wrong, checkpoint) == []


def test_a_checkpoint_cast_to_another_type_is_not_the_same(tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path / "hf", torch.bfloat16)
    wide = imported(source, tmp_path / "ckpt", dtype="fp32")
    found = differing(source, wide)
    assert {difference.what for difference in found} == {"torch.bfloat16 and torch.float32, the same values"}


@pytest.mark.matrix("two experts swapped", "betas and alphas exchanged")
@pytest.mark.parametrize("mistake", WRONG_TENSORS)
def test_mistakes_in_the_weights_that_change_logits_are_found(
    mistake: str, converted: Converted, tmp_path: Path
) -> None:
    case, change, *arguments = WRONG_TENSORS[mistake]
    theirs = oracle(case)
    wrong = write_hf(tmp_path / "wrong", theirs.config, change(theirs.tensors, *arguments))
    found = differing(wrong, converted(case)[1])
    assert found and all("values differ" in difference.what for difference in found)


@pytest.mark.matrix("gates not normalized", "yarn dropped")
@pytest.mark.parametrize("mistake", WRONG_CONFIGS)
def test_mistakes_in_the_config_that_change_logits_are_found(
    mistake: str, converted: Converted, tmp_path: Path
) -> None:
    case, section, changes = WRONG_CONFIGS[mistake]
    source, checkpoint = converted(case)
    copied = shutil.copytree(checkpoint, tmp_path / "iter_0000000")
    wrong = with_(oracle(case).ours, section, **changes).model_dump(mode="json")
    write_marker(copied, dataclasses.replace(read_marker(checkpoint), model=wrong))
    assert differing(source, checkpoint) == []
    assert {difference.name for difference in differing(source, copied)} == {"config"}


def scaled(place: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Make one scale of blocks another one: of mxfp4, whose scales are exponents, the next."""

    def change(scales: Tensor) -> Tensor:
        copy = scales.clone()
        copy[place] = copy[place] + 1 if scales.dtype == torch.uint8 else 2 * copy[place]
        return copy

    return change


DOWN, FUSED = "model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.experts.down_proj"
MTP_EMBEDDING = "model.layers.3.embed_tokens.weight"
REPEATED: list[tuple[Callable[[], tuple[Any, ...]], str, Callable[[Tensor], Tensor], str]] = [
    (int4_model, DOWN + "_scale", scaled((5, 1)), DOWN),
    (mxfp4_model, FUSED + "_scales", scaled((5, 2, 1)), FUSED),
    (with_mtp, MTP_EMBEDDING, torch.zeros_like, MTP_EMBEDDING),
]
"""A model, a tensor of its folder, how it is changed, and the tensor that differs then."""


@pytest.mark.matrix("mxfp4")
@pytest.mark.parametrize(("made", "name", "change", "found"), REPEATED, ids=["int4", "mxfp4", "an MTP embedding"])
def test_a_changed_scale_or_repeated_tensor_is_found(
    made: Callable[[], tuple[Any, ...]], name: str, change: Callable[[Tensor], Tensor], found: str, tmp_path: Path
) -> None:
    config, tensors, *_ = made()
    checkpoint = imported(write_hf(tmp_path / "hf", config, tensors), tmp_path / "ckpt")
    other = write_hf(tmp_path / "other", config, changed(tensors, {name: change}))
    for pair in ((other, checkpoint), (checkpoint, other)):
        assert [difference.name for difference in differing(*pair)] == [found]


@pytest.mark.full
def test_a_tied_output_that_differs_is_found_in_any_pair_of_formats(tmp_path: Path, converted: Converted) -> None:
    theirs = oracle("qwen3")
    source, checkpoint = converted("qwen3")
    output = theirs.tensors["model.embed_tokens.weight"].clone()
    same = write_hf(tmp_path / "same", theirs.config, theirs.tensors | {"lm_head.weight": output})
    output = output.clone()
    output[3, 5] += 1
    other = write_hf(tmp_path / "other", theirs.config, theirs.tensors | {"lm_head.weight": output})
    for known in (source, checkpoint, same):
        assert differing(known, same) == []
        for pair in ((known, other), (other, known)):
            found = differing(*pair)
            assert [difference.name for difference in found] == ["lm_head.weight"]
            assert "1 of 4752 values differ" in str(found[0])
