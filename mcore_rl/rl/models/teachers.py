"""Teachers of on-policy distillation: their logprobs of the student's completions, by passes on the training ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_rl.config.model import ModelConfig
from mcore_rl.parallel.schedule import run_pass
from mcore_rl.replay.witness import proving
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.models.frozen_model import FrozenModel, WaitingBytes
from mcore_rl.rl.models.reference import Reference
from mcore_rl.rl.passes.batch import Minibatch, PolicyMicrobatch, SampleShape
from mcore_rl.rl.passes.heads import TeacherHead


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSource:
    """A teacher that the config names, before it is built."""

    path: Path
    model: ModelConfig


class Teachers:
    """The teachers of a run, by index, whose routers choose for themselves. Methods are collective over the world."""

    def __init__(self, teachers: Sequence[FrozenModel | Reference]) -> None:
        """Take the teachers in the order of `rl.distill.paths`; the policy's earlier self is a `Reference`."""
        self._teachers = teachers
        self.earlier_self = next((one for one in teachers if isinstance(one, Reference)), None)
        """The policy as it was, which is made anew from time to time; None: it is no teacher."""

    @property
    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes of each teacher on this rank between passes."""
        return [one.waiting_bytes for one in self._teachers]

    @torch.no_grad()
    def with_logprobs(
        self, minibatches: Sequence[Minibatch], shapes: Mapping[int, SampleShape], head: TeacherHead
    ) -> list[Minibatch]:
        """Return the minibatches with the logprobs of each sample's teacher.

        Args:
            minibatches: this rank's samples.
            shapes: shapes of all samples of the rollout batch, the same on all ranks.
            head: what is kept of the passes.
        """
        found = list(minibatches)
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
