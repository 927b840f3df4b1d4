"""The kernels of experts, computed by Triton's interpreter, beside a product for each expert by torch.

Both sides are in float32; sums in another order, and exponentials of two libraries: 1e-5 of numbers of the size of 1.
"""

import numpy
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from mcore_rl.backend.gpu import experts

WIDTH, INNER = 40, 24
ERROR = {"rtol": 1e-5, "atol": 1e-5}


def example(sizes):
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    fc1, fc2 = normal(len(sizes), 2 * INNER, WIDTH) / 6, normal(len(sizes), WIDTH, INNER) / 5
    tensors = normal(sum(sizes), WIDTH), normal(sum(sizes)).sigmoid(), fc1, fc2
    return [tensor.requires_grad_() for tensor in tensors], torch.tensor(sizes), normal(sum(sizes), WIDTH)


def one_by_one(rows, gates, fc1, fc2, counts):
    """The experts one after another."""
    outputs = []
    for rows_of, gates_of, first, second in zip(
        rows.split(counts.tolist()), gates.split(counts.tolist()), fc1, fc2, strict=True
    ):
        gate, up = (rows_of @ first.T).chunk(2, -1)
        outputs.append((torch.nn.functional.silu(gate) * up * gates_of[:, None]) @ second.T)
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "sizes",
    [[5, 0, 70, 0, 0, 33], [0, 0, 64], [32, 32, 0], [1], [0, 107, 0, 0]],
    ids=["uneven", "first empty", "whole tiles", "one row", "one expert"],
)
def test_results_and_gradients_are_those_of_each_expert(sizes):
    inputs, counts, pull = example(sizes)
    wanted = one_by_one(*inputs, counts)
    found = experts.swiglu_experts(*inputs, counts)
    torch.testing.assert_close(found, wanted, **ERROR)
    found_gradients = torch.autograd.grad((found * pull).sum(), inputs)
    torch.testing.assert_close(found_gradients, torch.autograd.grad((wanted * pull).sum(), inputs), **ERROR)
    empty = counts == 0
    assert not found_gradients[2][empty].any() and not found_gradients[3][empty].any()


def test_without_gradients_the_products_are_not_kept(monkeypatch):
    inputs, counts, _ = example([5, 0, 70, 33])
    hidden, original = [], experts._forward
    monkeypatch.setattr(experts, "_forward", lambda *args: hidden.append(args[-1]) or original(*args))
    with torch.no_grad():
        found = experts.swiglu_experts(*inputs, counts)
    torch.testing.assert_close(found, one_by_one(*inputs, counts), **ERROR)
    experts.swiglu_experts(*inputs, counts)
    assert [kept if kept is None else tuple(kept.shape) for kept in hidden] == [None, (108, 2 * INNER)]


def test_the_backward_pass_keeps_the_inputs_and_the_first_product():
    inputs, counts, _ = example([5, 0, 70, 33])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        experts.swiglu_experts(*inputs, counts)
    *shapes, ends, hidden = [tuple(tensor.shape) for tensor in kept]
    assert shapes == [tuple(tensor.shape) for tensor in inputs]
    assert (ends, hidden) == ((4,), (108, 2 * INNER))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_to_those_of_earlier_microbatches(dtype, bf16_in_the_interpreter):
    """`main_grad` in float32 gets each microbatch's gradient unrounded; an expert without rows keeps its bits."""
    generator = torch.Generator().manual_seed(6)
    inputs, wanted, first = [], [], torch.tensor([5, 0, 70])
    for sizes in (first.tolist(), [0, 0, 40]):
        tensors, counts, pull = example(sizes)
        inputs.append(([tensor.detach().to(dtype) for tensor in tensors], counts, pull.to(dtype)))
    weights = [tensor.requires_grad_() for tensor in inputs[0][0][2:]]
    for weight in weights:
        weight.main_grad = torch.randn(weight.shape, generator=generator)
        weight.grad_added_to_main_grad = False
    wanted = [weight.main_grad.double() for weight in weights]
    began = [weight.main_grad.clone() for weight in weights]
    for (rows, gates, *_), counts, pull in inputs:
        experts.swiglu_experts(rows, gates, *weights, counts).backward(pull)
        exact = [tensor.detach().double().requires_grad_() for tensor in (rows, gates, *weights)]
        more = torch.autograd.grad((one_by_one(*exact, counts) * pull).sum(), exact[2:])
        wanted = [total + gradient for total, gradient in zip(wanted, more, strict=True)]
    for weight, total, before in zip(weights, wanted, began, strict=True):
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape  # its arrival runs Megatron's hook
        assert torch.equal(weight.main_grad[1], before[1])
        # In bf16 the activations are rounded, the sums are not.
        error = (weight.main_grad.double() - total).norm() / total.norm()
        assert error <= (1e-6 if dtype == torch.float32 else 4e-3)


def test_a_frozen_weight_gets_no_gradient():
    inputs, counts, pull = example([5, 0, 70, 33])
    inputs[2].requires_grad_(False)
    wanted = torch.autograd.grad((one_by_one(*inputs, counts) * pull).sum(), [inputs[0], *inputs[3:]])
    experts.swiglu_experts(*inputs, counts).backward(pull)
    assert inputs[2].grad is None
    torch.testing.assert_close([inputs[0].grad, inputs[3].grad], list(wanted), **ERROR)


@pytest.fixture
def bf16_in_the_interpreter(monkeypatch):
    """Triton's interpreter keeps bf16 as its bits, multiplies these as integers, and cuts float32 off: here it
    multiplies the numbers, and rounds to the nearest one as a GPU does.
    """
    builder, integers = interpreter.InterpreterBuilder, numpy.uint16

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32
        )

    multiply, cast = builder.create_dot, builder.cast_impl

    def rounded(self, source, to):
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        numbers = torch.from_numpy(numpy.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(numbers.view(torch.int16).numpy().view(integers), tl.bfloat16)

    monkeypatch.setattr(
        builder, "create_dot", lambda self, left, right, *rest: multiply(self, wide(left), wide(right), *rest)
    )
    monkeypatch.setattr(builder, "cast_impl", rounded)


@pytest.mark.parametrize("sizes", [[5, 0, 70, 33], [0, 129, 0]], ids=["uneven", "one expert"])
def test_experts_in_bf16_are_near_float64(sizes, bf16_in_the_interpreter):
    """Inputs are the same numbers in both; results, the first product, the activation and their gradients are rounded
    to 2^-9 each: 0.4 % of a norm, where torch's rounding after each step gives as much.
    """
    inputs, counts, pull = example(sizes)
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    pull = pull.bfloat16()
    found, wanted = experts.swiglu_experts(*rounded, counts), one_by_one(*exact, counts)
    gradients = torch.autograd.grad(found, rounded, pull)
    of_exact = torch.autograd.grad(wanted, exact, pull.double())
    for mine, theirs in zip((found, *gradients), (wanted, *of_exact), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).norm() <= 4e-3 * theirs.norm()


def test_experts_in_16_bits_are_rounded_once_after_each_product():
    """The oracle is in float64, of the same numbers, rounded to 2^-11: the interpreter has no products in bf16."""
    inputs, counts, _ = example([5, 0, 70, 33])
    rounded = [tensor.detach().half().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    found, wanted = experts.swiglu_experts(*rounded, counts), one_by_one(*exact, counts)
    assert found.dtype == torch.float16
    assert (found.double() - wanted).norm() <= 2e-3 * wanted.norm()
