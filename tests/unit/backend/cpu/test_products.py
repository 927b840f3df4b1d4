from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mcore_rl.backend.cpu.compiled import build_id
from mcore_rl.backend.cpu.kernels import HAS_ONEDNN, CpuKernels, Process, using, weights_unchanged
from mcore_rl.backend.cpu.products import (
    add_weight_gradient,
    gated_by_onednn,
    is_worthwhile,
    linear,
    product,
    weight_gradient,
)


@pytest.fixture(params=["mkl", "onednn"], autouse=True)
def products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both libraries, whichever is faster on this machine."""
    with using(CpuKernels(products=request.param, half="fp32")):
        yield


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
    with using(CpuKernels(products="onednn")):
        assert is_worthwhile(operand, 256) is taken
    with using(CpuKernels(products="mkl")):
        assert not is_worthwhile(operand, 256)


def test_a_weight_gradient_sums_over_all_rows() -> None:
    gradient, input = torch.randn(1100, 32), torch.randn(1100, 48)
    expected = gradient.double().t() @ input.double()
    torch.testing.assert_close(weight_gradient(gradient, input).double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("num_rows", [40, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_is_added_to_what_is_there(num_rows: int, dtype: torch.dtype) -> None:
    gradient, input = torch.randn(num_rows, 32).to(dtype), torch.randn(num_rows, 48).to(dtype)
    total = torch.full((32, 48), 3.0)
    add_weight_gradient(total, gradient, input)
    # Of operands in bf16 too: neither a product nor its sum with what is there is rounded to it.
    tolerance = 1e-5
    torch.testing.assert_close(
        total.double() - 3.0, gradient.double().t() @ input.double(), rtol=tolerance, atol=1e-3
    )


def buffered(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Give a weight what Megatron's data parallelism gives it, in a format of its own."""
    weight.main_grad = torch.ones_like(weight, dtype=dtype)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weight


def test_a_buffered_gradient_is_summed_in_the_buffer() -> None:
    """Two microbatches of one step; the hook must add nothing to what is in the buffer already."""
    weight = buffered(torch.randn(24, 16, requires_grad=True))
    rows = torch.randn(2, 70, 16)
    for microbatch in rows:
        linear(microbatch, weight).sum().backward()
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    expected = 1.0 + rows.double().sum((0, 1)).expand(24, 16)
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-4)  # type: ignore[attr-defined]


def test_the_gradient_of_a_tied_embedding_is_not_lost() -> None:
    """Megatron's hook adds what arrives at such a weight: the lookup's gradient, and nothing of the output layer's."""
    weight = buffered(torch.randn(24, 16, requires_grad=True))
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    embedded = torch.nn.functional.embedding(torch.tensor([3, 5]), weight)
    linear(embedded, weight).sum().backward()
    with torch.no_grad():
        from_lookup = torch.zeros(24, 16).index_add_(0, torch.tensor([3, 5]), weight.sum(0).expand(2, 16))
        from_output = weight[[3, 5]].sum(0).expand(24, 16)
    torch.testing.assert_close(weight.grad, from_lookup)
    torch.testing.assert_close(weight.main_grad, 1.0 + from_output)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [37, 512])
def test_a_linear_layer_of_bf16_is_that_of_float64_rounded_once(rows: int) -> None:
    """The sum in a buffer of fp32 is not rounded."""
    input = torch.randn(rows, 256).bfloat16().requires_grad_()
    weight = buffered(torch.randn(192, 256).bfloat16().requires_grad_(), torch.float32)
    gradient = torch.randn(rows, 192).bfloat16()
    linear(input, weight).backward(gradient)
    exact_input, exact_weight, exact_gradient = input.double(), weight.double(), gradient.double()
    with torch.no_grad():
        assert_rounded_once(linear(input, weight), exact_input @ exact_weight.t())
    assert_rounded_once(input.grad, exact_gradient @ exact_weight)
    torch.testing.assert_close(
        weight.main_grad.double(),  # type: ignore[attr-defined]
        1.0 + exact_gradient.t() @ exact_input,
        rtol=1e-5,
        atol=1e-4,
    )


def test_torchs_products_of_bf16_are_taken_where_they_were_chosen() -> None:
    input, weight = torch.randn(64, 256).bfloat16(), torch.randn(192, 256).bfloat16()
    with using(CpuKernels(half="torch")), weights_unchanged():
        assert torch.equal(linear(input, weight), torch.mm(input, weight.t()))
        assert not Process.weight_copies


def assert_rounded_once(found: Tensor | None, exact: Tensor) -> None:
    """Compare elements with the nearest number in bf16, or in fp32's error its neighbour."""
    assert found is not None and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact.bfloat16().double(), rtol=2**-7, atol=1e-4)


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


def rounded(tensor: Tensor) -> Tensor:
    return tensor.detach().bfloat16().double()


def test_products_of_bf16_round_operands_and_nothing_else() -> None:
    """The gradient too is of rounded operands; what is summed in a buffer stays fp32."""
    input, weight = (
        torch.randn(130, 256, requires_grad=True),
        buffered(torch.randn(192, 256, requires_grad=True)),
    )
    wanted = torch.randn(130, 192)
    with using(CpuKernels(products="bf16")):
        output = linear(input, weight)
        output.backward(wanted)
    exact = {
        "output": (output, rounded(input) @ rounded(weight).t()),
        "input": (input.grad, rounded(wanted) @ rounded(weight)),
        "weight": (weight.main_grad, 1.0 + rounded(wanted).t() @ rounded(input)),  # type: ignore[attr-defined]
    }
    for name, (ours, theirs) in exact.items():
        assert ours is not None and ours.dtype == torch.float32, name
        # A sum is rounded to 8 bits once.
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=4e-3)
    assert not torch.equal(output, torch.nn.functional.linear(input, weight))


def test_tensors_in_bf16_are_multiplied_as_they_are_where_products_round() -> None:
    """With sums in fp32, by whoever multiplies; torch alone rounds the sums too."""
    input, weight, gradient = (torch.randn(shape).bfloat16() for shape in ((64, 96), (80, 96), (64, 80)))
    kernels = CpuKernels("bf16", "sdpa", build_id(), "compiled", "fp32")
    with using(kernels):
        assert_rounded_once(linear(input, weight), input.double() @ weight.double().t())
        total = torch.ones(80, 96)
        add_weight_gradient(total, gradient, input)
    exact = 1.0 + gradient.double().t() @ input.double()
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        (CpuKernels(products="bf16", rounded="torch"), torch.float32),
        (CpuKernels(products="bf16", rounded="mkl"), torch.float32),
        (CpuKernels(half="fp32"), torch.bfloat16),
    ],
    ids=["rounded", "rounded, in fp32", "widened"],
)
def test_a_converted_weight_is_kept_while_weights_do_not_change(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    input, weight = torch.randn(4, 64).to(dtype), torch.ones(8, 64, dtype=dtype)
    with using(kernels):
        with weights_unchanged():
            first = linear(input, weight)
            weight.mul_(2.0)
            assert torch.equal(linear(input, weight), first)
            assert not torch.equal(linear(input, weight[:3]), first[:, :3])
        assert torch.equal(linear(input, weight), 2.0 * first)


def test_logits_of_a_router_are_never_rounded() -> None:
    """Rounded ones would choose other experts than the engine's or a GPU's."""
    gated = gated_by_onednn(lambda input, weight, *_: input @ weight.t())
    input, weight = torch.randn(64, 256), torch.randn(16, 256)
    with using(CpuKernels(products="bf16")):
        logits = gated(input, weight, None, torch.float32)
    torch.testing.assert_close(logits.double(), input.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
