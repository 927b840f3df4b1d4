"""Reward models: the Bradley-Terry loss of pairs, its metrics, and the trainer."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mcore_rl.config.preferences import RewardModelConfig, RewardModelSection
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import HeadOutput, signal_of
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.build import unwrap
from mcore_rl.model.heads import ScoreLayer
from mcore_rl.train.loop import Run
from mcore_rl.train.preferences import PreferenceMicrobatch, PreferenceSource, PreferenceTrainer
from mcore_rl.train.state import TrainState

NUM_BINS = 5
"""Number of equal bins for the confidence of predictions, which is between 0.5 and 1."""


def pair_losses(
    chosen_P: Tensor,
    rejected_P: Tensor,
    margins_P: Tensor,
    probabilities_P: Tensor,
    *,
    label_smoothing: float,
    centering_coeff: float,
) -> Tensor:
    """Return the loss of each pair in nats, `[P]` (arXiv 2203.02155, eq. 1; with a margin 2307.09288, eq. 2).

    `probabilities_P` is 0.5 for a tie; `label_smoothing` is the probability that a label is flipped. `centering_coeff`
    weighs (chosen + rejected)^2, which fixes the mean of the scores (arXiv 2312.09244).
    """
    difference_P = chosen_P - rejected_P
    is_right_P = (1 - label_smoothing) * probabilities_P + label_smoothing * (1 - probabilities_P)
    losses_P = -is_right_P * logsigmoid(difference_P - margins_P)
    losses_P = losses_P - (1 - is_right_P) * logsigmoid(-difference_P - margins_P)
    return losses_P + centering_coeff * (chosen_P + rejected_P).square()


def pair_statistics(
    rewards_N: Tensor, pairs_P2: Tensor, probabilities_P: Tensor, lengths_N: Tensor
) -> dict[str, Tensor]:
    """Return the sums for `reward_metrics`, float64 scalars. `probabilities_P` has the probability that the chosen
    answer is better; ties have no correct order.
    """
    chosen_P, rejected_P = pairs_P2.unbind(1)
    lengths_N = lengths_N.double()
    differences_P = rewards_N[chosen_P] - rewards_N[rejected_P]
    is_decided_P = probabilities_P > 0.5
    # Equal scores count as half correct, so that a constant model has accuracy 0.5.
    right_P = ((differences_P > 0).double() + 0.5 * (differences_P == 0)) * is_decided_P
    longer_P = (lengths_N[chosen_P] - lengths_N[rejected_P]).sign()
    differs_P = longer_P != 0
    prefers_longer_P = ((differences_P * longer_P > 0).double() + 0.5 * (differences_P == 0)) * differs_P
    sums = {
        "decided": is_decided_P.double().sum(),
        "right": right_P.sum(),
        "chosen_reward": rewards_N[chosen_P].sum(),
        "rejected_reward": rewards_N[rejected_P].sum(),
        "of_other_length": differs_P.double().sum(),
        "prefers_longer": prefers_longer_P.sum(),
        "chosen_longer": (longer_P > 0).double().sum(),
        "answers": rewards_N.new_tensor(float(len(rewards_N))),
        "reward": rewards_N.sum(),
        "reward_squares": rewards_N.square().sum(),
        "length": lengths_N.sum(),
        "length_squares": lengths_N.square().sum(),
        "reward_times_length": (rewards_N * lengths_N).sum(),
    }
    # Probability with which the model prefers the answer with the higher score.
    confidence_P = torch.sigmoid(differences_P.abs())
    bin_P = ((confidence_P - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    for index in range(NUM_BINS):
        is_here_P = is_decided_P & (bin_P == index)
        sums[f"bin_{index}"] = is_here_P.double().sum()
        sums[f"bin_{index}_confidence"] = (confidence_P * is_here_P).sum()
        sums[f"bin_{index}_right"] = (right_P * is_here_P).sum()
    return sums


def reward_metrics(sums: dict[str, float]) -> Iterator[Metric]:
    """Yield the metrics `pairs/*` from the sums that a `RewardHead` outputs; nothing without pairs."""
    pairs, answers, decided = sums["count"], sums["answers"], sums["decided"]
    if not pairs:
        return
    yield Metric("pairs/loss", sums["loss"], pairs)
    yield Metric("pairs/chosen_reward", sums["chosen_reward"], pairs)
    yield Metric("pairs/rejected_reward", sums["rejected_reward"], pairs)
    yield Metric("pairs/reward_margin", sums["chosen_reward"] - sums["rejected_reward"], pairs)
    yield Metric("pairs/reward_mean", sums["reward"], answers)
    reward_std = _std(sums["reward"], sums["reward_squares"], answers)
    yield Metric("pairs/reward_std", reward_std)
    if decided:
        yield Metric("pairs/accuracy", sums["right"], decided)
        gaps = [abs(sums[f"bin_{i}_confidence"] - sums[f"bin_{i}_right"]) for i in range(NUM_BINS)]
        yield Metric("pairs/calibration_error", sum(gaps), decided)
    if unequal := sums["of_other_length"]:
        yield Metric("pairs/prefers_longer_fraction", sums["prefers_longer"], unequal)
        yield Metric("pairs/chosen_longer_fraction", sums["chosen_longer"], unequal)
    if spread := reward_std * _std(sums["length"], sums["length_squares"], answers):
        covariance = sums["reward_times_length"] / answers - sums["reward"] * sums["length"] / answers**2
        yield Metric("pairs/length_correlation", covariance / spread)


def calibration_table(sums: dict[str, float]) -> list[dict[str, float]]:
    """Return bounds, number of pairs, mean confidence and accuracy of each confidence bin that has pairs."""
    width = 0.5 / NUM_BINS
    return [
        {
            "from": round(0.5 + index * width, 6),
            "to": round(0.5 + (index + 1) * width, 6),
            "pairs": int(pairs),
            "confidence": sums[f"bin_{index}_confidence"] / pairs,
            "accuracy": sums[f"bin_{index}_right"] / pairs,
        }
        for index in range(NUM_BINS)
        if (pairs := sums[f"bin_{index}"])
    ]


def step_losses(scores_T: Tensor, labels_T: Tensor, *, label_smoothing: float) -> Tensor:
    """Return the cross entropy of each step's label in nats, `[T]`, where sigmoid(score) is the predicted probability
    that the step is correct (arXiv 2305.20050). Labels are probabilities, and NaN where no step ends: the loss is 0
    there.
    """
    # A NaN must not reach the product: its gradient would be NaN too.
    right_T = (1 - label_smoothing) * labels_T.nan_to_num(0.5) + label_smoothing * (1 - labels_T.nan_to_num(0.5))
    losses_T = -right_T * logsigmoid(scores_T) - (1 - right_T) * logsigmoid(-scores_T)
    return losses_T.where(~labels_T.isnan(), 0.0)


def step_statistics(scores_T: Tensor, labels_T: Tensor) -> dict[str, Tensor]:
    """Return the sums for `StepRewardHead.metrics`, float64 scalars; `labels_T` as in `step_losses`."""
    is_step_T = ~labels_T.isnan()
    scores, labels = scores_T[is_step_T].double(), labels_T[is_step_T].double()
    is_decided, is_right = labels != 0.5, labels > 0.5
    hits = (scores > 0) == is_right
    return {
        "count": is_step_T.double().sum(),
        "right": is_right.double().sum(),
        "decided": is_decided.double().sum(),
        "hits": (hits & is_decided).double().sum(),
        "wrong": (labels < 0.5).double().sum(),
        "wrong_found": (hits & (labels < 0.5)).double().sum(),
        "probability": torch.sigmoid(scores).sum(),
    }


def _std(total: float, squares: float, count: float) -> float:
    mean = total / count
    variance = squares / count - mean * mean
    # Otherwise rounding of the two terms would show as the spread of a constant.
    return math.sqrt(variance) if variance > 1e-14 * max(squares / count, 1e-300) else 0.0


class RewardHead:
    """Computes the loss of pairs from the score at the last token of each sequence."""

    wants_losses = False

    def __init__(self, mesh: Mesh, config: RewardModelSection) -> None:
        self._cp = mesh.cp
        self._config = config

    def count(self, microbatch: PreferenceMicrobatch) -> Tensor:
        """Return the number of pairs on the first context-parallel rank, and 0 on the rest."""
        return microbatch.num_pairs(self._cp)

    def __call__(self, microbatch: PreferenceMicrobatch, output: Tensor) -> HeadOutput:
        """Collective over the context-parallel ranks: return the loss of one microbatch from scores `[1, T, 1]`."""
        rewards_N = self.rewards(microbatch, output)
        chosen_P, rejected_P = rewards_N[microbatch.pairs_P2].unbind(1)
        losses_P = pair_losses(
            chosen_P,
            rejected_P,
            self._config.margin_coeff * microbatch.margins_P,
            microbatch.probabilities_P,
            label_smoothing=self._config.label_smoothing,
            centering_coeff=self._config.centering_coeff,
        )
        sums = pair_statistics(
            rewards_N.detach(), microbatch.pairs_P2, microbatch.probabilities_P, microbatch.answer_lengths_N
        )
        sums |= {"loss": losses_P.detach().sum(), "count": torch.ones_like(losses_P).sum()}
        # All context-parallel ranks have the same pairs: only the first rank reports them.
        share = float(self._cp.rank == 0)
        outputs = {name: value * share for name, value in sums.items()} | signal_of(rewards_N)
        return HeadOutput(loss=losses_P.sum(), count=self.count(microbatch), outputs=outputs)

    def rewards(self, microbatch: PreferenceMicrobatch, output: Tensor) -> Tensor:
        """Collective over the context-parallel ranks: return the score of each whole sequence, float64 `[N]`."""
        return microbatch.sequence_sums(output[0, :, 0].where(microbatch.is_last_T, 0.0), self._cp)

    def metrics(self, sums: dict[str, float]) -> list[Metric]:
        """Return the metrics of a training step or an evaluation from the world's sums of the outputs."""
        return list(reward_metrics(sums))


class StepRewardHead:
    """Computes the cross entropy of step labels from the score at the last token of each step."""

    wants_losses = False

    def __init__(self, config: RewardModelSection) -> None:
        self._config = config

    def count(self, microbatch: PreferenceMicrobatch) -> Tensor:
        """Return the number of labelled steps that end on this rank's positions."""
        assert microbatch.labels_T is not None
        return (~microbatch.labels_T.isnan()).sum().to(torch.int)

    def __call__(self, microbatch: PreferenceMicrobatch, output: Tensor) -> HeadOutput:
        """Return the loss of one microbatch from scores `[1, T, 1]`."""
        assert microbatch.labels_T is not None
        scores_T = output[0, :, 0].double()
        losses_T = step_losses(scores_T, microbatch.labels_T.double(), label_smoothing=self._config.label_smoothing)
        outputs = step_statistics(scores_T.detach(), microbatch.labels_T)
        outputs["loss"] = losses_T.detach().sum()
        outputs |= signal_of(scores_T)
        return HeadOutput(loss=losses_T.sum(), count=self.count(microbatch), outputs=outputs)

    def metrics(self, sums: dict[str, float]) -> list[Metric]:
        """Return the metrics `steps/*` of a training step or an evaluation from the world's sums of the outputs."""
        if not sums["count"]:
            return []
        metrics = [
            Metric("steps/loss", sums["loss"], sums["count"]),
            Metric("steps/right_fraction", sums["right"], sums["count"]),
            Metric("steps/mean_probability", sums["probability"], sums["count"]),
        ]
        if sums["decided"]:
            metrics.append(Metric("steps/accuracy", sums["hits"], sums["decided"]))
        if sums["wrong"]:
            metrics.append(Metric("steps/wrong_found_fraction", sums["wrong_found"], sums["wrong"]))
        return metrics


def reward_head(mesh: Mesh, config: RewardModelConfig) -> RewardHead | StepRewardHead:
    """Return the head for the config's data: pairs, or labelled steps."""
    return StepRewardHead(config.rm) if config.data.has_steps else RewardHead(mesh, config.rm)


class RewardModelTrainer(PreferenceTrainer):
    """Trains a reward model; scores are shifted after the last step."""

    def __init__(
        self,
        run: Run,
        config: RewardModelConfig,
        head: RewardHead | StepRewardHead,
        *,
        train: PreferenceSource,
        valid: PreferenceSource | None,
    ) -> None:
        super().__init__(run, head, train=train, valid=valid)
        self._shifts = config.shifts_scores

    def run(self) -> None:
        """Train like `Trainer.run`. Scores are not shifted during training, even if the run is extended."""
        if self.state.progress.step < self.state.config.train.steps:
            set_shift(self.state, 0.0)
        super().run()

    def _evaluate(self, *, is_last: bool) -> None:
        if is_last and self._shifts:
            # A run that was killed after its last save starts with the shift that it saved.
            set_shift(self.state, 0.0)
            sums = self._pair_sums(self._valid or self._train, self.state.config.train.eval_batches or 1)
            shift = sums["chosen_reward"] / sums["count"]
            set_shift(self.state, shift)
            self.log.message(
                f"from now on {shift:.6g} is subtracted from all scores: those of the chosen answers have mean 0",
                step=self.state.progress.step,
            )
        super()._evaluate(is_last=is_last)


def set_shift(state: TrainState, shift: float) -> None:
    """Set the number to subtract from every score, where this rank has the model's scalar head."""
    for chunk in state.chunks:
        layer = getattr(unwrap(chunk), "output_layer", None)
        if isinstance(layer, ScoreLayer):
            layer.shift.fill_(shift)
