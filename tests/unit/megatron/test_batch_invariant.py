"""Products and attention that do not depend on the other rows of a batch, and their refusals."""

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.batch_invariant import InvariantProducts, attention, is_on, switch_on


@pytest.mark.parametrize(("depth", "width"), [(64, 192), (256, 1024), (48, 8)])
def test_a_row_has_the_same_bits_in_every_batch(depth, width):
    generator = torch.Generator().manual_seed(depth)
    rows, weight = (torch.randn(200, depth, generator=generator), torch.randn(width, depth, generator=generator))
    with InvariantProducts():
        whole = linear(rows, weight)
        for part in (slice(0, 1), slice(7, 8), slice(30, 47), slice(60, 188)):
            assert torch.equal(linear(rows[part], weight), whole[part])
            assert torch.equal(rows[part] @ weight.t(), whole[part])
        batched = torch.bmm(rows.view(8, 25, depth), weight.t().expand(8, depth, width))
        assert torch.equal(batched.flatten(0, 1), whole)
    torch.testing.assert_close(whole.double(), rows.double() @ weight.t().double(), rtol=1e-4, atol=1e-4)
    assert not is_on()


def test_gradients_are_those_of_the_products():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(33, 24, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 24, generator=generator, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad((linear(rows, weight) ** 2).sum(), (rows, weight))
    with InvariantProducts():
        found = torch.autograd.grad((linear(rows, weight) ** 2).sum(), (rows, weight))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch multiplies expert by expert")
def test_rows_of_an_expert_have_the_same_bits_whatever_the_others_have():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(60, 24, generator=generator, requires_grad=True)
    weights = torch.randn(4, 24, 40, generator=generator, requires_grad=True)

    def products(counts):
        ends = torch.tensor(counts).cumsum(0).int()
        return torch.nn.functional.grouped_mm(rows[: sum(counts)], weights, offs=ends)

    with InvariantProducts():
        few, many = products([3, 0, 5, 2]), products([3, 17, 30, 10])
        assert torch.equal(few[:3], many[:3])
        gradients = torch.autograd.grad((many * many.detach()).sum(), (rows, weights))
    parts = rows.double().split([3, 17, 30, 10])
    wanted = torch.cat([part @ weight for part, weight in zip(parts, weights.double(), strict=True)])
    torch.testing.assert_close(many.double(), wanted, rtol=1e-5, atol=1e-5)
    exact = torch.autograd.grad((wanted * many.detach()).sum(), (rows, weights))
    torch.testing.assert_close(gradients, exact, rtol=1e-4, atol=1e-3)


def test_attention_is_torch_s_and_has_the_same_bits_over_longer_caches():
    generator = torch.Generator().manual_seed(2)

    def heads(length, count, width, dtype=torch.float32):
        return torch.randn(length, 1, count, width, generator=generator, dtype=dtype)

    query, key, value = heads(150, 4, 16), heads(150, 2, 16), heads(150, 2, 24)
    visible = torch.ones(150, 150, dtype=torch.bool).tril()
    with InvariantProducts():
        whole = attention(query, key, value, visible, 0.25)
        for t in (0, 1, 63, 64, 100, 149):
            # A query alone over a cache that is longer than its prefix, with something else behind it.
            cache = [torch.cat([x[: t + 1], 7 * torch.ones(90, *x.shape[1:])]) for x in (key, value)]
            seen = (torch.arange(t + 91) <= t)[None]
            assert torch.equal(attention(query[t : t + 1], *cache, seen, 0.25), whole[t : t + 1])
    wide = [x.double().permute(1, 2, 0, 3) for x in (query, key, value)]
    wanted = scaled_dot_product_attention(*wide, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(whole.double(), wanted.permute(2, 0, 1, 3), rtol=1e-5, atol=1e-5)


def test_a_gpu_without_the_kernels_is_refused():
    with pytest.raises(ConfigError, match=r"deterministic=false.*Set platform.deterministic=true"):
        switch_on(is_cuda=True, is_deterministic=False)
    with pytest.raises(ConfigError, match="batch_invariant_ops is not installed"):
        switch_on(is_cuda=True, is_deterministic=True)
    assert not is_on()
