"""Teachers for on-policy distillation: logprobs of the student's completions, from passes on the training ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.loss import DistillConfig
from mcore_rl.megatron.schedule import HeadOutput, ReadsDeferredLogits, run_pass
from mcore_rl.megatron.vocab import Logits
from mcore_rl.replay.witness import proving
from mcore_rl.rl.batch import LogprobHead, Minibatch, PassHead, PolicyMicrobatch, evaluating
from mcore_rl.rl.frozen_model import FrozenModel
from mcore_rl.rl.models.reference import Reference, refresh_when_due
from mcore_rl.rl.step.losses import LOG_RATIO_LIMIT, log_difference
from mcore_rl.rl.types import Rollout, SampleShape, WaitingBytes
from mcore_rl.train.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSource:
    """A teacher in the config, before its model is built."""

    path: Path
    model: ModelConfig


class TeacherHead(PassHead, ReadsDeferredLogits):
    """Outputs a teacher's `logprobs` `[T]` of completion tokens and, if asked, its logprobs over the `vocabulary`."""

    def __init__(self, logprobs: LogprobHead, *, vocabulary: bool) -> None:
        """Take the head of the policy's logprobs, for the same tokens and temperature."""
        self._logprobs, self._vocabulary = logprobs, vocabulary

    def __call__(self, microbatch: PolicyMicrobatch, output: Logits) -> HeadOutput:
        """Return the logprobs of one microbatch; there is no loss."""
        found = self._logprobs(microbatch, output)
        if self._vocabulary:
            found.outputs["vocabulary"] = self._logprobs.vocabulary(microbatch, output)
        return found


class Teachers:
    """The teachers of a run, by index, with live routing. Every method is collective over the world."""

    def __init__(
        self,
        teachers: Sequence[FrozenModel | Reference | None],
        distill: DistillConfig,
        logprobs: LogprobHead,
        state: TrainState,
        *,
        updates_per_rollout: int,
    ) -> None:
        """Prepare this rank. `teachers` are in the order of `distill.paths`, an earlier version of the policy as a
        `Reference`, a server as None.
        """
        self._teachers, self._distill, self._state = teachers, distill, state
        self._head = TeacherHead(logprobs, vocabulary=distill.estimator == "vocabulary")
        self._updates_per_rollout = updates_per_rollout
        self.needs_old_logprobs = distill.use == "advantage"

    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes of each teacher on this rank between passes."""
        return [teacher.waiting_bytes for teacher in self._teachers if teacher is not None]

    def add(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with the logprobs of each sample's teacher."""
        with self._state.timers.phase("teacher"):
            return self._with_logprobs(minibatches, rollout.shapes)

    def in_advantages(self, microbatch: PolicyMicrobatch) -> PolicyMicrobatch:
        """Return the microbatch with its coefficient x (log teacher - log old policy) added to its advantages, if
        rl.distill.use="advantage". Its mean times the gradient of the policy's logprob is minus the gradient of
        KL(policy || teacher).
        """
        distill = self._distill
        if microbatch.teacher_logprobs_T is None or distill.use != "advantage":
            return microbatch
        assert microbatch.advantages_T is not None and microbatch.old_logprobs_T is not None
        gap_T = log_difference(microbatch.teacher_logprobs_T, microbatch.old_logprobs_T)
        gap_T = gap_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).where(microbatch.mask_T, 0.0)
        return replace(microbatch, advantages_T=microbatch.advantages_T + distill.reverse_coeff * gap_T)

    def refresh(self) -> None:
        """Make the current policy its own teacher every `rl.distill.self_refresh_rollouts` rollout batches."""
        for teacher in self._teachers:
            if isinstance(teacher, Reference):
                refresh_when_due(
                    teacher, self._distill.self_refresh_rollouts, self._state.progress.step, self._updates_per_rollout
                )

    @torch.no_grad()
    def _with_logprobs(self, minibatches: Sequence[Minibatch], shapes: Mapping[int, SampleShape]) -> list[Minibatch]:
        """Return the minibatches with teacher logprobs; `shapes` covers all samples and is the same on all ranks."""
        head, found = self._head, list(minibatches)
        # All ranks run a pass over all microbatches for each teacher that any sample has.
        for index in sorted({shape.teacher for shape in shapes.values()}):
            teacher = self._teachers[index]
            if teacher is None:
                if self._state.mesh.is_last_stage:
                    found = [
                        replace(
                            minibatch,
                            microbatches=[
                                with_outputs_of_teacher(microbatch, _of_server(microbatch), shapes, index)
                                for microbatch in minibatch.microbatches
                            ],
                        )
                        for minibatch in found
                    ]
                continue
            with teacher.installed(), evaluating(teacher.chunks):
                for place, minibatch in enumerate(found):
                    if not minibatch.num_samples:
                        continue
                    with proving(teacher.chunks, is_imposed=False):
                        outputs = run_pass(teacher.chunks, minibatch.microbatches, head, backward=False)
                    if outputs:
                        kept = [
                            with_outputs_of_teacher(microbatch, output, shapes, index)
                            for microbatch, output in zip(minibatch.microbatches, outputs, strict=True)
                        ]
                        found[place] = replace(minibatch, microbatches=kept)
        return found


def _of_server(microbatch: PolicyMicrobatch) -> dict[str, Tensor]:
    """Return a server's logprobs `[T]` of trained tokens, NaN where an answer is missing; 0 elsewhere."""
    if microbatch.teacher_TW is None:  # padding alone
        return {"logprobs": torch.zeros_like(microbatch.rollout_logprobs_T)}
    return {"logprobs": microbatch.teacher_TW[:, 0].where(microbatch.mask_T, 0.0)}


def with_outputs_of_teacher(
    microbatch: PolicyMicrobatch, output: Mapping[str, torch.Tensor], shapes: Mapping[int, SampleShape], index: int
) -> PolicyMicrobatch:
    """Return the microbatch with the outputs of teacher `index` at positions of samples that this teacher has."""
    is_own_N = torch.tensor([shapes[sample].teacher == index for sample in microbatch.samples] or [False])
    is_own_T = is_own_N.to(microbatch.sequence_T.device)[microbatch.sequence_T]
    before_T, vocabulary_Nv = microbatch.teacher_logprobs_T, output.get("vocabulary")
    logprobs_T = output["logprobs"]
    if before_T is not None:
        logprobs_T = logprobs_T.where(is_own_T, before_T)
    if vocabulary_Nv is not None and microbatch.teacher_vocabulary_Nv is not None:
        is_own_C = is_own_T[microbatch.completion_mask_T].cpu()
        vocabulary_Nv = vocabulary_Nv.where(is_own_C[:, None], microbatch.teacher_vocabulary_Nv)
    return replace(microbatch, teacher_logprobs_T=logprobs_T, teacher_vocabulary_Nv=vocabulary_Nv)
