import pytest
import torch
from torch import Tensor

from mcore_rl.backend.cpu.products import HAS_ONEDNN, is_worthwhile, linear, product, weight_gradient


def matrix(rows: int, columns: int, layout: str) -> Tensor:
    if layout == "transposed":
        return torch.randn(columns, rows).t()
    return (
        torch.randn(rows, columns + 3)[:, :columns] if layout == "with gaps" else torch.randn(rows, columns)
    )


@pytest.mark.parametrize("rows", [0, 1, 33, 512])
@pytest.mark.parametrize("left", ["dense", "transposed", "with gaps"])
@pytest.mark.parametrize("right", ["dense", "transposed", "with gaps"])
def test_a_product_is_right_in_every_layout(rows: int, left: str, right: str) -> None:
    first, second = matrix(rows, 96, left), matrix(160, 96, right)
    torch.testing.assert_close(
        product(first, second).double(), first.double() @ second.double().t(), rtol=1e-5, atol=1e-4
    )


def test_onednn_computes_in_full_fp32() -> None:
    """Not with operands rounded to bf16, as it can be asked to: that would be off by a hundred times this."""
    assert HAS_ONEDNN, "torch for CPUs comes with it"
    first, second = torch.randn(512, 256), torch.randn(256, 256)
    assert is_worthwhile(first, 256)
    exact = first.double() @ second.double().t()
    assert (product(first, second) - exact).abs().max() < 2e-6 * exact.abs().max() * 5


@pytest.mark.parametrize(
    ("operand", "taken"),
    [
        (torch.zeros(512, 256), True),
        (torch.zeros(511, 256), False),  # each number of rows would have a kernel compiled
        (torch.zeros(16, 256), False),  # too small to pay
        (torch.zeros(512, 256, dtype=torch.bfloat16), False),  # torch's own is oneDNN's
    ],
    ids=["large", "odd", "small", "bf16"],
)
def test_only_large_even_fp32_products_are_onednns(operand: Tensor, taken: bool) -> None:
    assert is_worthwhile(operand, 256) is taken


def test_a_weight_gradient_sums_over_all_rows() -> None:
    gradient, input = torch.randn(1100, 32), torch.randn(1100, 48)
    expected = gradient.double().t() @ input.double()
    torch.testing.assert_close(weight_gradient(gradient, input).double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", [(4, 16, 256), (37, 256), (0, 2, 256)], ids=str)
def test_a_linear_layer_has_the_gradients_of_torchs(shape: tuple[int, ...]) -> None:
    input, weight = torch.randn(shape, requires_grad=True), torch.randn(192, 256, requires_grad=True)
    expected = torch.nn.functional.linear(input.double(), weight.double())
    actual = linear(input, weight)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    wanted = torch.autograd.grad(expected.square().sum(), [input, weight])
    found = torch.autograd.grad(actual.square().sum(), [input, weight])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-2)


def test_the_output_may_be_changed_in_place() -> None:
    """Megatron's cross entropy does."""
    input, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    output = linear(input, weight)
    output -= 1.0
    output.sum().backward()
    torch.testing.assert_close(weight.grad, input.detach().sum((0, 1)).expand(4, 8))


def test_a_frozen_weight_gets_no_gradient() -> None:
    input, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    linear(input, weight).sum().backward()
    torch.testing.assert_close(input.grad, weight.sum(0).expand(3, 8))
