"""Weights go from Hugging Face to Megatron and back bit for bit; what does not fit is named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mcore_rl.errors import CheckpointError
from tests.hf_models import CASES, VOCAB, Tensors, oracle
from tests.hf_weights import to_global, to_hf


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_identical(case: str, dtype: torch.dtype) -> None:
    theirs = oracle(case)
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in theirs.tensors.items()
    }
    again = to_hf(to_global(tensors, theirs.ours), theirs.ours)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    "case", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "glm4_moe", "olmoe", "deepseek_v2"]
)
def test_fused_experts_make_the_same_megatron_tensors(case: str) -> None:
    theirs = oracle(case)
    ours, fused = theirs.ours, dict(theirs.model.state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    assert_equal(to_global(fused, ours), to_global(theirs.tensors, ours))


def test_the_expert_bias_stays_fp32_in_a_bf16_model() -> None:
    theirs = oracle("deepseek_v3")
    made = to_global({name: tensor.bfloat16() for name, tensor in theirs.tensors.items()}, theirs.ours)
    types = {key.endswith("expert_bias"): tensor.dtype for key, tensor in made.items()}
    assert types == {True: torch.float32, False: torch.bfloat16}


def test_the_vocabulary_is_padded_with_zeros() -> None:
    theirs = oracle("llama")
    made = to_global(theirs.tensors, theirs.ours)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert len(made[key]) == 112
        assert not made[key][VOCAB:].any()


def test_a_tied_output_may_be_repeated_if_it_is_equal() -> None:
    theirs = oracle("qwen3")
    embedding = theirs.tensors["model.embed_tokens.weight"]
    repeated = theirs.tensors | {"lm_head.weight": embedding.clone()}
    assert_equal(to_global(repeated, theirs.ours), to_global(theirs.tensors, theirs.ours))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        to_global(theirs.tensors | {"lm_head.weight": embedding + 1}, theirs.ours)


def test_tensors_that_follow_from_the_config_are_passed_over() -> None:
    theirs = oracle("llama")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}
    assert_equal(to_global(theirs.tensors | frequencies, theirs.ours), to_global(theirs.tensors, theirs.ours))


NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.experts.3.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != NORM}, rf"{NORM} \(48,\) is missing"),
    "left over": (lambda t: t | {"model.mystery": torch.ones(3)}, r"model.mystery \(3,\) belongs to nothing"),
    "wrong shape": (lambda t: t | {UP: torch.ones(24, 47)}, rf"{UP} has shape \(24, 47\), the model wants \(24, 48\)"),
    "wrong dtype": (lambda t: t | {UP: t[UP].half()}, rf"{UP} is torch.float16, other parts"),
    "another layer": (lambda t: t | {NORM.replace("1", "3"): t[NORM]}, "belongs to nothing in the model"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_are_named(fault: str) -> None:
    theirs = oracle("qwen3_moe")
    change, message = FAULTS[fault]
    with pytest.raises(CheckpointError, match=message):
        to_global(change(theirs.tensors), theirs.ours)


def test_megatron_tensors_that_do_not_fit_are_named() -> None:
    theirs = oracle("qwen3_moe")
    made = to_global(theirs.tensors, theirs.ours)
    router = made.pop("decoder.layers.mlp.router.weight")
    with pytest.raises(CheckpointError, match=r"decoder.layers.mlp.router.weight \(3, 6, 48\) is missing"):
        to_hf(made, theirs.ours)
    with pytest.raises(CheckpointError, match=r"has shape \(2, 6, 48\), the model wants \(3, 6, 48\)"):
        to_hf(made | {"decoder.layers.mlp.router.weight": router[:2]}, theirs.ours)


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    def same(one: Tensor, other: Tensor) -> bool:
        return one.dtype == other.dtype and torch.equal(one, other)

    assert ours.keys() == theirs.keys()
    assert all(same(ours[key], theirs[key]) for key in ours)
