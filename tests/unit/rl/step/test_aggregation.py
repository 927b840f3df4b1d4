"""Token weights against the means they stand for."""

import itertools

import pytest
import torch
from torch import tensor

from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.batch import BatchTotals
from mcore_rl.rl.step.losses import anchored_means, loss_weights

ALONE = Axis(None, 0, 1)
LENGTHS = tensor([4, 0, 2, 1])
VALUES = [tensor([1.0, 2.0, 3.0, 4.0]), tensor([]), tensor([10.0, 20.0]), tensor([5.0])]
MEANS = {
    "token_mean": 45 / 7,
    "seq_mean_token_mean": (2.5 + 15 + 5) / 3,  # the sequence without a trained token is not one of the batch
    "seq_mean_token_sum_norm": (10 + 30 + 5) / 8 / 3,
}


@pytest.mark.parametrize("aggregation", MEANS)
def test_the_weighted_sum_over_the_number_of_tokens_is_the_mean_on_any_cut(aggregation):
    totals = BatchTotals(num_tokens=7, num_sequences=3)
    for cut in ([0, 4], [0, 1, 4], [0, 2, 3, 4]):
        total = 0.0
        for start, end in itertools.pairwise(cut):
            weights = loss_weights(LENGTHS[start:end], totals, aggregation, norm_tokens=8)
            assert weights.isfinite().all()
            total += sum(weight * values.sum() for weight, values in zip(weights, VALUES[start:end], strict=True))
        assert total / totals.num_tokens == pytest.approx(MEANS[aggregation])


def test_a_mean_of_the_sequence_is_anchored_at_each_of_its_tokens():
    values = tensor([1.0, 5.0, 3.0, 9.0], dtype=torch.float64, requires_grad=True)
    means = anchored_means(values, tensor([0, 1, 0, 1]), tensor([2, 2]), ALONE)
    assert means.tolist() == [2.0, 7.0, 2.0, 7.0]
    (gradient,) = torch.autograd.grad((means * tensor([1.0, 2.0, 3.0, 4.0])).sum(), values)
    assert gradient.tolist() == [1.0, 2.0, 3.0, 4.0]
