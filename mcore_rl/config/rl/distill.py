"""The section `rl.distill`: teachers of the student's own rollouts."""

from functools import cached_property
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from mcore_rl.config.section import Section, Store, Text

SELF = "self"
"""Name of the teacher that is the policy's own earlier self."""


class DistillConfig(Section):
    """On-policy distillation (2306.13649): the policy learns, on its own completions, from a teacher's logprobs."""

    teacher: Text | None = None
    """Teacher of all prompts without a tag in `teachers`: a checkpoint, folder of checkpoints or run of a language
    model with the policy's tokenizer, or `self`, the policy as it was at the start; `none`: there is none."""
    teachers: dict[str, Text] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Teachers by tag, such as {math = "runs/a", code = "runs/b"}, for prompts with that tag in `tag_field`."""
    tag_field: Text = "teacher"
    """Field of a prompt's line with its tag."""
    use: Literal["advantage", "loss"] = "advantage"
    """Place of KL(policy || teacher); `advantage`: coeff x (log teacher - log old policy) of a token is added to its
    advantage; `loss`: coeff x the KL is added to the loss."""
    estimator: Literal["token", "vocabulary"] = "token"
    """KL at a token; `token`: of the sampled token alone, in the loss with the gradient of k2; `vocabulary`: the sum
    over all tokens, in the loss alone, for which the teacher's logprobs of them all wait in main memory."""
    coeff: PositiveFloat = 1.0
    """Coefficient of the KL; rl.advantage.kind="zero" leaves the teacher alone."""
    self_refresh_rollouts: PositiveInt | None = None
    """Rollout batches after which the teacher `self` becomes the policy as it is then; `none`: never."""
    store: Store = "host"
    """Memory in which the teachers' weights wait for their passes: beside the policy, main memory, or a file without a
    name in the run's folder, which `self` cannot be in."""

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """All teachers, in the order of their indices: `teacher` first."""
        return (*([] if self.teacher is None else [self.teacher]), *self.teachers.values())

    @cached_property
    def has_self(self) -> bool:
        """Whether the policy's own earlier self is a teacher."""
        return SELF in self.paths

    def index_of(self, tag: object) -> int | None:
        """Return the index in `paths` of the teacher of a prompt with this tag; None: it has none."""
        if isinstance(tag, str) and tag in self.teachers:
            return list(self.teachers).index(tag) + (self.teacher is not None)
        return None if self.teacher is None else 0
