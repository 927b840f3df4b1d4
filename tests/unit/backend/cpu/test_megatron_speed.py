"""What stands in for parts of Megatron computes what they compute."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import router
from megatron.core.utils import local_multi_tensor_scale
from torch import Tensor

from mcore_rl.backend.cpu.megatron_speed import REPLACEMENTS, scaled_in_place


def test_a_gradient_is_clipped_where_it_is() -> None:
    gradients = [torch.full((4,), 2.0), torch.full((2, 2), -6.0)]
    places = [gradient.data_ptr() for gradient in gradients]
    scaled_in_place(local_multi_tensor_scale)(0, torch.zeros(1), [gradients, gradients], 0.5)
    assert [gradient.unique().item() for gradient in gradients] == [1.0, -3.0]
    assert [gradient.data_ptr() for gradient in gradients] == places


def test_scaling_into_other_tensors_leaves_the_sources() -> None:
    source, target = torch.ones(3), torch.zeros(3)
    scaled_in_place(local_multi_tensor_scale)(0, torch.zeros(1), [[source], [target]], 4.0)
    assert source.tolist() == [1.0] * 3
    assert target.tolist() == [4.0] * 3


@pytest.mark.parametrize(
    "options", [{}, {"mscale": 1.0}, {"mscale": 0.7}, {"rotary_interleaved": True}], ids=str
)
@pytest.mark.parametrize("width", [8, 12])
def test_rotary_positions_are_megatrons(options: dict[str, Any], width: int) -> None:
    heads, freqs = torch.randn(5, 2, 3, width, requires_grad=True), torch.randn(5, 1, 1, 8)
    call = rope_utils._apply_rotary_pos_emb_bshd

    def gradients(function: Any) -> list[Tensor]:
        rotated = function(heads, freqs, **options)
        return [rotated.detach(), *torch.autograd.grad((rotated * torch.arange(width)).sum(), heads)]

    for ours, megatrons in zip(gradients(call), gradients(call.__wrapped__), strict=True):
        torch.testing.assert_close(ours, megatrons, rtol=1e-5, atol=1e-5)


class Alone:
    """A context-parallel group of one rank."""

    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


@pytest.mark.parametrize("options", [{}, {"mscale": 0.7}, {"rotary_interleaved": True}], ids=str)
@pytest.mark.parametrize("lengths", [(5, 1, 9, 2), (9,), (3, 3)], ids=str)
@pytest.mark.parametrize("width", [8, 12])
def test_packed_sequences_are_each_rotated_from_their_start(
    options: dict[str, Any], lengths: tuple[int, ...], width: int
) -> None:
    """As many angles as positions are angles of the row's positions, in Megatron: there is one sequence then."""
    heads = torch.randn(sum(lengths), 3, width, requires_grad=True)
    freqs = torch.randn(9, 1, 1, 8)
    bounds = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rotated = rope_utils._apply_rotary_pos_emb_thd(heads, bounds, freqs, cp_group=Alone(), **options)
    alone = rope_utils._apply_rotary_pos_emb_bshd.__wrapped__
    expected = torch.cat(
        [alone(part[:, None], freqs[: len(part)], **options)[:, 0] for part in heads.split(lengths)]
    )
    weights = torch.randn_like(rotated)
    for one, other in (
        (rotated, expected),
        *zip(
            *[torch.autograd.grad((each * weights).sum(), heads) for each in (rotated, expected)], strict=True
        ),
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("router_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_logits_are_megatrons(dtype: torch.dtype, router_dtype: torch.dtype) -> None:
    input, weight = torch.randn(256, 64).to(dtype), torch.randn(128, 64).to(dtype).requires_grad_()
    call = router.router_gating_linear

    def gradients(function: Any) -> list[Tensor]:
        logits = function(input.requires_grad_(), weight, None, router_dtype)
        return [logits.detach(), *torch.autograd.grad(logits.square().sum(), [input, weight])]

    for ours, megatrons in zip(gradients(call), gradients(call.__wrapped__), strict=True):
        torch.testing.assert_close(ours, megatrons, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("symbol", REPLACEMENTS)
def test_every_replacement_is_in_its_place(symbol: str) -> None:
    module, name = symbol.split(":")
    owner = __import__(f"megatron.core.{module}", fromlist=[name])
    make, _ = REPLACEMENTS[symbol]
    assert getattr(owner, name).__code__.co_filename == make.__code__.co_filename


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_is_megatrons(has_bias: bool) -> None:
    weight, bias = torch.randn(64, 128, requires_grad=True), torch.randn(64, requires_grad=True)
    input = torch.randn(48, 4, 128, requires_grad=True)
    leaves = [input, weight, bias] if has_bias else [input, weight]
    options: dict[str, Any] = {
        "bias": bias if has_bias else None,
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
        "tp_group": None,
    }
    call = layers.linear_with_grad_accumulation_and_async_allreduce
    assert hasattr(call, "__wrapped__"), "Megatron's own"

    def gradients(function: Any) -> list[Tensor]:
        plain = options | {"tp_group": "unused"} if function is not call else options
        output = function(input, weight, **plain)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    for ours, megatrons in zip(gradients(call), gradients(call.__wrapped__), strict=True):
        torch.testing.assert_close(ours, megatrons, rtol=1e-4, atol=1e-2)
