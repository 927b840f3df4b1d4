"""The config of a reward model's training."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.section import Section


class RewardModelSection(Section):
    """The loss on pairs: -log sigmoid(chosen - rejected - margin) of the scores at the answers' last tokens (arXiv
    2203.02155). With data.format="steps" it is the cross entropy between each step's label and the score at the step's
    last token (arXiv 2305.20050).
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair in the data has its answers swapped, or that the label of a step is wrong."""
    margin_coeff: NonNegativeFloat = 1.0
    """Factor on the margin of a pair in the data (data.margin_field), by which the chosen score must be larger (arXiv
    2307.09288); 0: margins are not used."""
    centering_coeff: NonNegativeFloat = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0 (arXiv 2312.09244; TRL's
    center_rewards_coefficient, where 0.01 is usual)."""
    shift: Literal["auto", "chosen", "none"] = "auto"
    """Number that is subtracted from all scores after the last step; `chosen`: the mean score of the chosen answers of
    the evaluation (without an evaluation, of as many training pairs), which then score 0 on average (arXiv 2203.02155);
    `none`: nothing. Either way, comparisons of pairs are the same. `auto`: `chosen` with pairs, `none` with steps, for
    which scores are logits of probabilities."""


class RewardModelConfig(PreferenceRunConfig):
    """`mcore-rl rm`."""

    run_dir: str = "runs/rm"
    """Folder of everything that the run writes; one run, one folder, one writer."""
    rm: RewardModelSection = RewardModelSection()

    @cached_property
    def shifts_scores(self) -> bool:
        """Whether a number is subtracted from all scores after the last step."""
        return self.rm.shift == "chosen" or (self.rm.shift == "auto" and not self.data.has_steps)

    @cached_property
    def trains_scores(self) -> bool:
        """Always true: the model has a scalar head."""
        return True
