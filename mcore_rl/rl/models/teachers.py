"""Teachers of on-policy distillation: their logprobs of the student's completions, by passes on the training ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.distill import DistillConfig
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.schedule import run_pass
from mcore_rl.replay.witness import proving
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.models.frozen_model import FrozenModel
from mcore_rl.rl.models.reference import Reference, refresh_when_due
from mcore_rl.rl.objectives.policy_tokens import LOG_RATIO_LIMIT, log_difference
from mcore_rl.rl.passes.batch import Minibatch, PolicyMicrobatch, SampleShape
from mcore_rl.rl.passes.heads import LogprobHead, TeacherHead
from mcore_rl.rl.passes.optional import Pass
from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.types import WaitingBytes
from mcore_rl.train.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSource:
    """A teacher that the config names, before it is built."""

    path: Path
    model: ModelConfig


class Teachers(Pass):
    """The teachers of a run, by index, whose routers choose for themselves. Methods are collective over the world."""

    def __init__(
        self,
        teachers: Sequence[FrozenModel | Reference],
        distill: DistillConfig,
        logprobs: LogprobHead,
        state: TrainState,
        *,
        updates_per_rollout: int,
    ) -> None:
        """Prepare this rank.

        Args:
            teachers: the teachers in the order of `distill.paths`; the policy's earlier self is a `Reference`.
            distill: `rl.distill`.
            logprobs: the head of the policy's logprobs: the same tokens at the same temperature.
            state: the policy in training.
            updates_per_rollout: optimizer steps of a rollout batch.
        """
        self._teachers, self._distill, self._state = teachers, distill, state
        self._head = TeacherHead(logprobs, vocabulary=distill.estimator == "vocabulary")
        self._updates_per_rollout = updates_per_rollout
        self.needs_old_logprobs = distill.use == "advantage"

    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes of each teacher on this rank between passes."""
        return [one.waiting_bytes for one in self._teachers]

    def add(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with the logprobs of each sample's teacher."""
        with self._state.timers.phase("teacher"):
            return self._with_logprobs(minibatches, rollout.shapes)

    def in_advantages(self, microbatch: PolicyMicrobatch) -> PolicyMicrobatch:
        """Return the microbatch with coeff x (log teacher - log old policy) added to its advantages, if asked for.

        Its mean, times the gradient of the policy's logprob, is minus the gradient of KL(policy || teacher).
        """
        one, distill = microbatch, self._distill
        if one.teacher_logprobs_T is None or distill.use != "advantage":
            return one
        assert one.advantages_T is not None and one.old_logprobs_T is not None
        gap_T = log_difference(one.teacher_logprobs_T, one.old_logprobs_T)
        gap_T = gap_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).where(one.mask_T, 0.0)
        return replace(one, advantages_T=one.advantages_T + distill.coeff * gap_T)

    def after_updates(self, minibatches: Sequence[Minibatch], *, policy_has_learned: bool) -> list[Metric]:
        """Make the policy its own teacher, every `rl.distill.self_refresh_rollouts` rollout batches."""
        for one in self._teachers:
            if isinstance(one, Reference):
                refresh_when_due(
                    one,
                    self._distill.self_refresh_rollouts,
                    self._state.progress.step,
                    self._updates_per_rollout,
                )
        return []

    @torch.no_grad()
    def _with_logprobs(
        self, minibatches: Sequence[Minibatch], shapes: Mapping[int, SampleShape]
    ) -> list[Minibatch]:
        """Return the minibatches with logprobs; `shapes` are of all samples, the same on all ranks."""
        head, found = self._head, list(minibatches)
        # All ranks take part in the passes of a teacher of any sample: each is a pass over all microbatches.
        for index in sorted({shape.teacher for shape in shapes.values()}):
            teacher = self._teachers[index]
            with teacher.installed(), evaluating(teacher.chunks):
                for place, minibatch in enumerate(found):
                    if not minibatch.num_samples:
                        continue
                    with proving(teacher.chunks, is_imposed=False):
                        outputs = run_pass(teacher.chunks, minibatch.microbatches, head, backward=False)
                    if outputs:
                        kept = [
                            with_outputs_of_teacher(one, output, shapes, index)
                            for one, output in zip(minibatch.microbatches, outputs, strict=True)
                        ]
                        found[place] = replace(minibatch, microbatches=kept)
        return found


def with_outputs_of_teacher(
    one: PolicyMicrobatch,
    output: Mapping[str, torch.Tensor],
    shapes: Mapping[int, SampleShape],
    index: int,
) -> PolicyMicrobatch:
    """Return the microbatch with the outputs of teacher `index` at the positions of its own samples."""
    is_own_N = torch.tensor([shapes[sample].teacher == index for sample in one.samples] or [False])
    is_own_T = is_own_N.to(one.sequence_T.device)[one.sequence_T]
    before_T, vocabulary_Nv = one.teacher_logprobs_T, output.get("vocabulary")
    logprobs_T = output["logprobs"]
    if before_T is not None:
        logprobs_T = logprobs_T.where(is_own_T, before_T)
    if vocabulary_Nv is not None and one.teacher_vocabulary_Nv is not None:
        is_own_C = is_own_T[one.completion_mask_T].cpu()
        vocabulary_Nv = vocabulary_Nv.where(is_own_C[:, None], one.teacher_vocabulary_Nv)
    return replace(one, teacher_logprobs_T=logprobs_T, teacher_vocabulary_Nv=vocabulary_Nv)
