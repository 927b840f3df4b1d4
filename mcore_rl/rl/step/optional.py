"""The parts of a training step that only some configs have: a reference policy, teachers, a critic, texts, splits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.step.batch import Minibatch, PolicyMicrobatch

if TYPE_CHECKING:  # a run imports only the parts that it has, when its program makes them
    from mcore_rl.rl.models.critic import Critic
    from mcore_rl.rl.models.reference import ReferencePass
    from mcore_rl.rl.models.teachers import Teachers
    from mcore_rl.rl.step.routing_split import RoutingSplits
    from mcore_rl.rl.step.texts import Texts


class AddsTensor(Protocol):
    """A part with a pass of its own over a rollout batch, without gradient."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether it reads the first minibatch's old logprobs or routes outside that minibatch's only update."""

    def add(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Collective over the world: return the minibatches with an additional tensor."""


class RewardKl(Protocol):
    """KL of the old policy to a reference, as a penalty on rewards."""

    @property
    def coeff(self) -> float:
        """Coefficient in this rollout batch."""

    def of_tokens(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return the KL `[T]` at each position of a microbatch, on the last stage."""

    def sums(self, num_samples: int, minibatches: Sequence[Minibatch]) -> Tensor:
        """Collective over the world: return the KL summed over each completion, float64 `[N]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionalParts:
    """The optional parts of a run's step, made by its program; None where the config does not ask for one."""

    splits: "RoutingSplits | None" = None
    reference: "ReferencePass | None" = None
    teachers: "Teachers | None" = None
    critic: "Critic | None" = None
    texts: "Texts | None" = None

    @property
    def with_passes(self) -> list[AddsTensor]:
        """The parts that add a tensor to each minibatch, in the order of their passes."""
        return [part for part in (self.reference, self.teachers, self.critic) if part is not None]

    @property
    def reward_kl(self) -> RewardKl | None:
        """The KL penalty on rewards; None without."""
        return None if self.reference is None else self.reference.reward_kl
