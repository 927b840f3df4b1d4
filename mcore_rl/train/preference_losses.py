"""Losses on pairs of answers: DPO and its family, in a single head."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mcore_rl.config.preferences import DPOKind, DPOSection
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import HeadOutput, ReadsDeferredLogits, signal_of
from mcore_rl.megatron.vocab import Logits
from mcore_rl.metrics.metrics import Metric
from mcore_rl.train.preferences import AnswerLogprobHead, PreferenceMicrobatch

LARGEST_LOGPROB = -(2.0**-24)
"""Largest logprob for which odds are computed: a larger probability is 1 in float32, with infinite odds."""


def sigmoid_loss(distance_P: Tensor) -> Tensor:
    """Return -log sigmoid(x) (arXiv 2305.18290, eq. 7)."""
    return softplus(-distance_P)


def hinge_loss(distance_P: Tensor) -> Tensor:
    """Return max(0, 1 - x) (arXiv 2309.06657)."""
    return torch.relu(1 - distance_P)


def squared_loss(distance_P: Tensor) -> Tensor:
    """Return x^2, which with x = log ratio - 1 / (2 beta) is IPO (arXiv 2310.12036, eq. 17)."""
    return distance_P**2


LOSSES: dict[DPOKind, Callable[[Tensor], Tensor]] = {
    "sigmoid": sigmoid_loss,
    "robust": sigmoid_loss,
    "ipo": squared_loss,
    "hinge": hinge_loss,
    "simpo": sigmoid_loss,
    "orpo": sigmoid_loss,
}


def expected_loss(
    loss: Callable[[Tensor], Tensor], difference_P: Tensor, target_P: Tensor, probability_P: Tensor
) -> Tensor:
    """Return the loss of each pair, averaged over both labels: p f(d - t) + (1 - p) f(-d - t). d is the first reward
    minus the second, t the desired margin of the better answer, and p may be outside 0 ... 1 to remove a bias.
    """
    right_P, wrong_P = loss(difference_P - target_P), loss(-difference_P - target_P)
    return probability_P * right_P + (1 - probability_P) * wrong_P


def smoothed_probability(probability_P: Tensor, flipped: float) -> Tensor:
    """Return the probability that the first answer is better if labels are wrong with probability `flipped` (cDPO)."""
    return (1 - flipped) * probability_P + flipped * (1 - probability_P)


def unbiased_probability(probability_P: Tensor, flipped: float) -> Tensor:
    """Return the weight that, in expectation, undoes labels flipped with probability `flipped` (arXiv 2403.00409): its
    `smoothed_probability` is the original probability. It may be above 1.
    """
    return (probability_P - flipped) / (1 - 2 * flipped)


def log_odds(mean_logprobs_N: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = e^x, the geometric mean of an answer's probabilities (arXiv 2403.07691)."""
    bounded_N = mean_logprobs_N.clamp(max=LARGEST_LOGPROB)
    # expm1, because 1 - e^x is 0 in float32 for x above -6e-8.
    return bounded_N - torch.log(-torch.expm1(bounded_N))


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLosses:
    """Loss and rewards of each pair, with gradient."""

    loss_P: Tensor
    chosen_P: Tensor
    """Reward of the chosen answer."""
    rejected_P: Tensor
    """Reward of the rejected answer."""


def pair_losses(
    logprobs_N: Tensor,
    reference_logprobs_N: Tensor | None,
    lengths_N: Tensor,
    pairs_P2: Tensor,
    margins_P: Tensor,
    probabilities_P: Tensor,
    config: DPOSection,
) -> PairLosses:
    """Return the loss of each pair that `config` selects, from logprobs of whole answers in nats; the reference's are
    None for losses without a reference. `probabilities_P` has the probability that the chosen answer is better.
    """
    assert config.uses_reference == (reference_logprobs_N is not None), config.loss
    gained_N = logprobs_N if reference_logprobs_N is None else logprobs_N - reference_logprobs_N
    if config.is_length_normalised:
        gained_N = gained_N / lengths_N
    rewards_N = config.beta * gained_N
    # The loss is a function of the difference of these numbers: without beta for IPO, the log odds for ORPO.
    compared_N = {"ipo": gained_N}.get(config.loss, rewards_N)
    if config.loss == "orpo":
        compared_N = log_odds(gained_N)
    chosen_P, rejected_P = pairs_P2.unbind(1)
    target_P = config.target_margin + config.margin_coeff * margins_P.to(compared_N)
    if config.loss == "ipo":  # (d - 1 / (2 beta))^2, arXiv 2310.12036
        target_P = target_P + 1 / (2 * config.beta)
    smooth = unbiased_probability if config.loss == "robust" else smoothed_probability
    loss_P = expected_loss(
        LOSSES[config.loss],
        compared_N[chosen_P] - compared_N[rejected_P],
        target_P,
        smooth(probabilities_P.to(compared_N), config.label_smoothing),
    )
    if config.loss == "orpo":
        loss_P = config.beta * loss_P
    if config.nll_weight:
        loss_P = loss_P - config.nll_weight * (logprobs_N / lengths_N)[chosen_P]
    return PairLosses(loss_P=loss_P, chosen_P=rewards_N[chosen_P], rejected_P=rewards_N[rejected_P])


class DPOHead(ReadsDeferredLogits):
    """Computes the loss that the section `dpo` selects, from the logprobs of whole answers."""

    wants_losses = False

    def __init__(self, logprobs: AnswerLogprobHead, mesh: Mesh, config: DPOSection) -> None:
        self._logprobs = logprobs
        self._mesh = mesh
        self._config = config

    def count(self, microbatch: PreferenceMicrobatch) -> Tensor:
        """Return the number of pairs on the first context-parallel rank, and 0 on the rest."""
        return microbatch.num_pairs(self._mesh.cp)

    def __call__(self, microbatch: PreferenceMicrobatch, output: Logits) -> HeadOutput:
        """Return the loss of one microbatch, with sums over its pairs as outputs."""
        logprobs_N = self._logprobs.answer_logprobs(microbatch, output)
        pairs = pair_losses(
            logprobs_N,
            microbatch.reference_logprobs_N,
            microbatch.answer_lengths_N,
            microbatch.pairs_P2,
            microbatch.margins_P,
            microbatch.probabilities_P,
            self._config,
        )
        chosen_P, rejected_P = microbatch.pairs_P2.unbind(1)
        is_decided_P = microbatch.probabilities_P == 1
        lengths_P = microbatch.answer_lengths_N[chosen_P]
        sums = {
            "loss": pairs.loss_P,
            "count": torch.ones_like(pairs.loss_P),
            "chosen_reward": pairs.chosen_P,
            "rejected_reward": pairs.rejected_P,
            "decided": is_decided_P,
            # Equal rewards, as at the start, count as half correct.
            "right": is_decided_P * (0.5 + 0.5 * (pairs.chosen_P - pairs.rejected_P).sign()),
            "chosen_logprob": logprobs_N[chosen_P],
            "rejected_logprob": logprobs_N[rejected_P],
            "chosen_tokens": lengths_P,
        }
        # All context-parallel ranks have the same pairs: only the first rank reports them.
        share = float(self._mesh.cp.rank == 0)
        outputs = {name: values_P.detach().double().sum() * share for name, values_P in sums.items()}
        outputs |= signal_of(logprobs_N)
        # Without pairs the sum is 0, with the gradient 0.
        return HeadOutput(loss=pairs.loss_P.sum(), count=self.count(microbatch), outputs=outputs)

    def metrics(self, sums: dict[str, float]) -> list[Metric]:
        """Return the metrics of a training step or an evaluation from the world's sums of the outputs."""
        pairs = max(sums["count"], 1.0)
        metrics = [
            Metric("pairs/loss", sums["loss"], pairs),
            Metric("pairs/chosen_reward", sums["chosen_reward"], pairs),
            Metric("pairs/rejected_reward", sums["rejected_reward"], pairs),
            Metric("pairs/reward_margin", sums["chosen_reward"] - sums["rejected_reward"], pairs),
            Metric("pairs/chosen_logprob", sums["chosen_logprob"], pairs),
            Metric("pairs/rejected_logprob", sums["rejected_logprob"], pairs),
            Metric("pairs/chosen_loss_nats", -sums["chosen_logprob"], max(sums["chosen_tokens"], 1.0)),
        ]
        if sums["decided"]:
            metrics.append(Metric("pairs/accuracy", sums["right"], sums["decided"]))
        return metrics
