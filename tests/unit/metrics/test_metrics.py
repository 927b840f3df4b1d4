import math

import pytest
import torch

from mcore_rl.metrics.metric_table import METRICS
from mcore_rl.metrics.metrics import Metric, reduced


def test_a_mean_is_the_sum_over_the_counts_not_the_mean_of_means_and_over_nothing_not_a_number():
    metrics = [Metric("train/loss_nats", 10.0, 4), Metric("train/loss_nats", 2.0, 1)]
    assert reduced(metrics) == {"train/loss_nats": 12.0 / 5}
    assert math.isnan(reduced([Metric("eval/loss_nats", 0.0, 0)])["eval/loss_nats"])


def test_perplexity_is_e_to_the_pooled_loss():
    metrics = [Metric("train/perplexity", 10.0, 4), Metric("train/perplexity", 2.0, 1)]
    assert reduced(metrics)["train/perplexity"] == pytest.approx(math.exp(2.4))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("moe/dropped_tokens", 6),  # SUM
        ("memory/peak_resident_bytes", 3),  # MAX
        ("train/lr", 2),  # LAST
    ],
)
def test_each_metric_is_reduced_as_its_row_says(name, expected):
    assert reduced(Metric(name, value) for value in (1, 3, 2)) == {name: expected}


def test_a_matrix_is_reduced_element_by_element():
    first, second = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[10, 0], [0, 5]])
    summed = reduced([Metric("moe/expert_load", first), Metric("moe/expert_load", second)])
    assert summed == {"moe/expert_load": [[11, 2], [3, 9]]}
    assert all(type(tokens) is int for row in summed["moe/expert_load"] for tokens in row)


def test_a_layer_has_the_row_of_all_layers_and_an_undocumented_name_is_refused_and_the_nearest_named():
    assert Metric("moe/layer_07/load_entropy", 0.5).reduce is METRICS["moe/layer_NN/load_entropy"].reduce
    with pytest.raises(ValueError, match=r"'train/loss_nat'.*Did you mean train/loss_nats\?"):
        Metric("train/loss_nat", 1.0)


def test_a_metric_does_not_keep_the_graph_of_its_tensor():
    weight = torch.ones(3, requires_grad=True)
    metric = Metric("train/loss_nats", (weight * 2).sum(), weight.sum())
    assert not metric.value.requires_grad and not metric.count.requires_grad


def test_the_unit_in_a_name_is_the_unit_in_the_table():
    units = {"_nats": "nats/token", "_s": "s", "_bytes": "bytes", "/bytes": "bytes", "_per_s_per_rank": "tokens/s"}
    named = [(name, unit) for name in METRICS for ending, unit in units.items() if name.endswith(ending)]
    assert [(name, unit) for name, unit in named if METRICS[name].unit != unit] == []
