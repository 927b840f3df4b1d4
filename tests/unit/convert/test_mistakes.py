"""Every fault of a converted checkpoint is found, however small it is."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rl.storage.checkpoint import read_marker, write_marker
from tests.conversion import differing, imported, saved, write_hf
from tests.hf_models import Tensors, oracle
from tests.unit.convert.conftest import Converted
from tests.unit.model.test_logits_equal_transformers import WRONG_CONFIGS, WRONG_TENSORS, swap

NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


def flipped(tensors: Tensors) -> Tensors:
    """One bit of one of all values."""
    changed = tensors[UP].clone()
    changed.view(torch.int32)[3, 5] ^= 1
    return tensors | {UP: changed}


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a flipped bit": (flipped, "1 of 1152 values differ"),
    "another type": (lambda t: t | {ROUTER: t[ROUTER].bfloat16()}, "torch.float32 and torch.bfloat16"),
    "minus zero": (lambda t: t | {NORM: -torch.zeros(48)}, "48 of 48 values differ"),
    "two experts swapped": (lambda t: swap(t, "1.mlp.experts.2.", "1.mlp.experts.5."), "1152 of 1152 values differ"),
}


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


@pytest.mark.matrix(
    "two experts swapped",
    "experts rotated",
    "biases dropped",
    "expert bias of minimax_m2 dropped",
    "biases of seed_oss dropped",
    "betas and alphas exchanged",
    "queries and keys exchanged",
    "gate above up",
)
@pytest.mark.parametrize("mistake", WRONG_TENSORS)
def test_mistakes_in_the_weights_that_change_logits_are_found(
    mistake: str, converted: Converted, tmp_path: Path
) -> None:
    case, change = WRONG_TENSORS[mistake]
    theirs = oracle(case)
    wrong = write_hf(tmp_path / "wrong", theirs.config, change(theirs.tensors))
    found = differing(wrong, converted(case)[1])
    assert found and all("values differ" in difference.what for difference in found)


@pytest.mark.matrix(
    "gates not normalized",
    "yarn dropped",
    "gates of qwen2_moe normalized",
    "yarn dropped from deepseek_v2",
    "scaling factor of glm4_moe_lite dropped",
    "gates of qwen3_next not normalized",
)
@pytest.mark.parametrize("mistake", WRONG_CONFIGS)
def test_mistakes_in_the_config_that_change_logits_are_found(
    mistake: str, converted: Converted, tmp_path: Path
) -> None:
    case, change = WRONG_CONFIGS[mistake]
    source, checkpoint = converted(case)
    copied = shutil.copytree(checkpoint, tmp_path / "iter_0000000")
    wrong = change(oracle(case).ours).model_dump(mode="json")
    write_marker(copied, dataclasses.replace(read_marker(checkpoint), model=wrong))
    assert differing(source, checkpoint) == []
    assert {difference.name for difference in differing(source, copied)} == {"config"}
