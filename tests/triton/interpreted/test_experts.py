"""The kernels of experts, computed by Triton's interpreter, beside a product for each expert by torch.

Both sides are in float32; sums in another order, and exponentials of two libraries: 1e-5 of numbers of the size of 1.
"""

import pytest
import torch

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
    [[5, 0, 70, 0, 0, 33], [0, 0, 64], [32, 32, 0], [1], [0, 7, 0, 0]],
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


def test_experts_in_16_bits_are_rounded_once_after_each_product():
    """The oracle is in float64, of the same numbers, rounded to 2^-11: the interpreter has no products in bf16."""
    inputs, counts, _ = example([5, 0, 70, 33])
    rounded = [tensor.detach().half().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    found, wanted = experts.swiglu_experts(*rounded, counts), one_by_one(*exact, counts)
    assert found.dtype == torch.float16
    assert (found.double() - wanted).norm() <= 2e-3 * wanted.norm()
