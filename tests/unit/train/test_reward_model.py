"""The loss of pairs, its gradient and its statistics against closed forms in float64."""

import math

import numpy
import pytest
import torch
from torch import Tensor

from mcore_rl.config.preferences import RewardModelSection
from mcore_rl.metrics.metrics import reduced
from mcore_rl.train.reward_model import (
    NUM_BINS,
    StepRewardHead,
    calibration_table,
    pair_losses,
    pair_statistics,
    reward_metrics,
    step_losses,
    step_statistics,
)

CHOSEN = [1.5, -0.25, 3.0, 40.0, -750.0]
REJECTED = [0.5, 0.75, 3.0, -40.0, 750.0]
MARGINS = [0.0, 0.5, 2.0, 0.0, 1.0]
PROBABILITIES = [1.0, 1.0, 0.5, 1.0, 1.0]


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softplus(x: float) -> float:
    """log(1 + e^x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x: float) -> float:
    return math.exp(-softplus(-x))


@pytest.mark.parametrize(("smoothing", "centering"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.3)])
@pytest.mark.parametrize("count", [5, 1])
def test_losses_and_gradients_of_pairs_equal_the_closed_form(smoothing: float, centering: float, count: int) -> None:
    chosen_P, rejected_P = (tensor(x[:count]).requires_grad_() for x in (CHOSEN, REJECTED))
    losses_P = pair_losses(
        chosen_P,
        rejected_P,
        tensor(MARGINS[:count]),
        tensor(PROBABILITIES[:count]),
        label_smoothing=smoothing,
        centering_coeff=centering,
    )
    losses_P.sum().backward()
    assert chosen_P.grad is not None and rejected_P.grad is not None
    for i in range(count):
        distance, margin = CHOSEN[i] - REJECTED[i], MARGINS[i]
        right = PROBABILITIES[i] * (1 - smoothing) + (1 - PROBABILITIES[i]) * smoothing
        total = CHOSEN[i] + REJECTED[i]
        loss = right * softplus(margin - distance) + (1 - right) * softplus(margin + distance)
        slope = -right * sigmoid(margin - distance) + (1 - right) * sigmoid(margin + distance)
        assert losses_P[i].item() == pytest.approx(loss + centering * total**2, rel=1e-12, abs=1e-9)
        pull = 2 * centering * total
        assert chosen_P.grad[i].item() == pytest.approx(slope + pull, rel=1e-12, abs=1e-9)
        assert rejected_P.grad[i].item() == pytest.approx(-slope + pull, rel=1e-12, abs=1e-9)


def test_metrics_are_those_of_the_pairs_however_they_are_dealt_to_microbatches() -> None:
    generator = numpy.random.default_rng(0)
    rewards, lengths = generator.normal(size=24), generator.integers(1, 9, 24)
    pairs = [(2 * i, 2 * i + 1) for i in range(12)]
    probabilities = [0.5 if i == 3 else 1.0 for i in range(12)]
    rewards[1] = rewards[0]  # a draw

    def sums_of(first: int, last: int) -> dict[str, float]:
        statistics = pair_statistics(
            torch.from_numpy(rewards[2 * first : 2 * last]),
            torch.tensor(pairs[: last - first], dtype=torch.int64).reshape(-1, 2),
            tensor(probabilities[first:last]),
            torch.from_numpy(lengths[2 * first : 2 * last]),
        )
        return {name: value.item() for name, value in statistics.items()}

    parts = [sums_of(0, 5), sums_of(5, 5), sums_of(5, 12)]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]} | {"count": 12.0, "loss": 6.0}
    found = reduced(reward_metrics(sums))

    decided = [(c, r) for i, (c, r) in enumerate(pairs) if probabilities[i] == 1]
    differences = numpy.array([rewards[c] - rewards[r] for c, r in decided])
    right = numpy.where(differences > 0, 1.0, numpy.where(differences == 0, 0.5, 0.0))
    confidence = 1 / (1 + numpy.exp(-abs(differences)))
    bins = numpy.minimum(((confidence - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    error = sum(abs(confidence[bins == b].sum() - right[bins == b].sum()) for b in range(NUM_BINS)) / 11
    longer = [(c, r) if lengths[c] > lengths[r] else (r, c) for c, r in pairs if lengths[c] != lengths[r]]
    prefers = [1.0 if rewards[x] > rewards[y] else 0.5 * (rewards[x] == rewards[y]) for x, y in longer]
    expected = {
        "pairs/loss": 0.5,
        "pairs/accuracy": right.mean(),
        "pairs/chosen_reward": rewards[::2].mean(),
        "pairs/rejected_reward": rewards[1::2].mean(),
        "pairs/reward_margin": (rewards[::2] - rewards[1::2]).mean(),
        "pairs/reward_mean": rewards.mean(),
        "pairs/reward_std": rewards.std(),
        "pairs/calibration_error": error,
        "pairs/prefers_longer_fraction": numpy.mean(prefers),
        "pairs/chosen_longer_fraction": numpy.mean([x % 2 == 0 for x, _ in longer]),
        "pairs/length_correlation": numpy.corrcoef(rewards, lengths)[0, 1],
    }
    assert found == pytest.approx(expected, rel=1e-9)
    table = calibration_table(sums)
    assert sum(row["pairs"] for row in table) == 11
    assert [row["accuracy"] for row in table] == pytest.approx(
        [right[bins == b].mean() for b in range(NUM_BINS) if (bins == b).any()]
    )


def test_a_model_of_one_score_for_all_has_the_accuracy_of_a_coin() -> None:
    statistics = pair_statistics(
        tensor([2.0] * 4), torch.tensor([[0, 1], [2, 3]]), tensor([1.0, 1.0]), torch.tensor([3, 1, 1, 2])
    )
    sums = {name: value.item() for name, value in statistics.items()} | {"count": 2.0, "loss": 1.4}
    found = reduced(reward_metrics(sums))
    assert (found["pairs/accuracy"], found["pairs/reward_std"]) == (0.5, 0)
    assert "pairs/length_correlation" not in found


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("count", [1, 7])
def test_losses_and_gradients_of_steps_equal_the_closed_form_and_other_tokens_have_none(
    smoothing: float, count: int
) -> None:
    scores = [0.75, -3.0, 800.0, -800.0, 0.0, 2.5, -1.25][:count]
    labels = [1.0, 1.0, 0.0, 0.25, math.nan, 0.0, math.nan][:count]
    scores_T = tensor(scores).requires_grad_()
    losses_T = step_losses(scores_T, tensor(labels), label_smoothing=smoothing)
    losses_T.sum().backward()
    assert scores_T.grad is not None
    for score, label, loss, slope in zip(scores, labels, losses_T.tolist(), scores_T.grad.tolist(), strict=True):
        if math.isnan(label):
            assert (loss, slope) == (0.0, 0.0)
            continue
        right = label * (1 - smoothing) + (1 - label) * smoothing
        assert loss == pytest.approx(right * softplus(-score) + (1 - right) * softplus(score), rel=1e-12, abs=1e-9)
        assert slope == pytest.approx(sigmoid(score) - right, rel=1e-12, abs=1e-9)


def test_metrics_of_steps_are_those_of_the_labelled_ones() -> None:
    scores_T = tensor([2.0, -1.0, 0.5, -0.5, 9.0, -9.0])
    labels_T = tensor([1.0, 1.0, 0.0, 0.0, math.nan, 0.5])
    sums = {name: value.item() for name, value in step_statistics(scores_T, labels_T).items()}
    found = reduced(StepRewardHead(RewardModelSection()).metrics(sums | {"loss": 10.0}))
    assert found == pytest.approx(
        {
            "steps/loss": 2.0,
            "steps/right_fraction": 2 / 5,
            "steps/mean_probability": sum(map(sigmoid, [2.0, -1.0, 0.5, -0.5, -9.0])) / 5,
            "steps/accuracy": 2 / 4,
            "steps/wrong_found_fraction": 1 / 2,
        }
    )
