"""The section `rl.distill`: teachers of the student's own rollouts."""

from functools import cached_property
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from mcore_rl.config.section import Section, Store, Text

SELF = "self"
"""Name of the teacher that is an earlier state of the policy."""


class DistillConfig(Section):
    """On-policy distillation (2306.13649): the policy learns from a teacher's logprobs on its own completions."""

    teacher: Text | None = None
    """Teacher of all prompts without a tag in `teachers`: a checkpoint, folder of checkpoints or run of a language
    model with the policy's tokenizer, or `self`, the policy as it was at the start; `none`: no teacher."""
    teachers: dict[str, Text] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Teachers by tag, such as {math = "runs/a", code = "runs/b"}, for prompts with that tag in `tag_field`."""
    tag_field: Text = "teacher"
    """Field of a prompt's line with its tag."""
    use: Literal["advantage", "loss"] = "advantage"
    """Where KL(policy || teacher) goes; `advantage`: coeff x (log teacher - log old policy) of a token is added to its
    advantage; `loss`: coeff x the KL is added to the loss."""
    estimator: Literal["token", "vocabulary"] = "token"
    """KL at a token; `token`: from the sampled token, in the loss with the gradient of k2; `vocabulary`: the sum over
    all tokens, only in the loss, for which the teacher's logprobs of all tokens wait in main memory."""
    coeff: PositiveFloat = 1.0
    """Coefficient of the KL; with rl.advantage.kind="zero" the policy learns from the teacher only."""
    self_refresh_rollouts: PositiveInt | None = None
    """Rollout batches after which the teacher `self` becomes the current policy; `none`: never."""
    store: Store = "host"
    """Memory in which the teachers' weights wait for their passes; `device`: the policy's; `host`: main memory."""

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """All teachers, in the order of their indices: `teacher` first."""
        return (*([] if self.teacher is None else [self.teacher]), *self.teachers.values())

    @cached_property
    def has_self(self) -> bool:
        """Whether an earlier state of the policy is a teacher."""
        return SELF in self.paths

    def index_of(self, tag: object) -> int | None:
        """Return the index in `paths` of the teacher for a prompt with this tag; None if it has no teacher."""
        if isinstance(tag, str) and tag in self.teachers:
            return list(self.teachers).index(tag) + (self.teacher is not None)
        return None if self.teacher is None else 0
