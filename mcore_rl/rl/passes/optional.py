"""The contract of what a step may have beside the policy's own passes: a reference, teachers, a critic, texts ..."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.schedule import Head
from mcore_rl.rl.objectives.losses import Objective
from mcore_rl.rl.passes.batch import Advantages, Minibatch, PolicyMicrobatch
from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.types import WaitingBytes
from mcore_rl.train.step import StepReport


class RewardKl(Protocol):
    """KL of the old policy to a reference that rewards pay for."""

    @property
    def coeff(self) -> float:
        """Coefficient in this rollout batch."""

    def of_tokens(self, one: PolicyMicrobatch) -> Tensor:
        """Return the KL at each position `[T]` of a microbatch on the last stage."""

    def sums(self, num_samples: int, minibatches: Sequence[Minibatch]) -> Tensor:
        """Collective over the world: return the KL summed over each completion, float64 `[N]`."""


class Pass:
    """A part of a step that a run has or has not. The program makes those that the config asks for, and the learner
    calls each at its places in the step, in which it does nothing unless it says otherwise. Every method is collective
    over the world.
    """

    needs_old_logprobs = False
    """Whether it reads the first minibatch's old logprobs or routes before or after the only update of that."""

    learns_before_policy = False
    """Whether it trains on a rollout batch before the policy's first update."""

    reward_kl: RewardKl | None = None
    """KL that rewards pay for; None: it has none."""

    def holds_policy(self) -> str | None:
        """Reason why the policy is not trained on the rollout batch that begins at this step; None: it is."""
        return None

    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes on this rank of its models that are not trained, between their passes."""
        return ()

    def add(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with a tensor more, of a pass without gradient."""
        return list(minibatches)

    def before_updates(self, minibatches: Sequence[Minibatch], advantages: Advantages) -> list[Metric]:
        """Do what comes between the advantages and the policy's updates, and return its metrics."""
        return []

    def in_advantages(self, microbatch: PolicyMicrobatch) -> PolicyMicrobatch:
        """Return the microbatch of an update with its part in the advantages."""
        return microbatch

    def in_objective(self, objective: Objective) -> Objective:
        """Return the terms of an update's loss with its own."""
        return objective

    def in_update(
        self,
        head: Head[Any],
        microbatches: Sequence[PolicyMicrobatch | LocalMicrobatch],
        num_tokens: int,
    ) -> tuple[Head[Any], Sequence[PolicyMicrobatch | LocalMicrobatch]]:
        """Return head and microbatches of an update, in which the world trains on `num_tokens`, with its own."""
        return head, microbatches

    def after_updates(self, minibatches: Sequence[Minibatch], *, policy_has_learned: bool) -> list[Metric]:
        """Do what comes after the last update of a rollout batch, and return its metrics."""
        return []

    def take_reports(self) -> list[StepReport]:
        """Return the optimizer steps of a model of its own since the last call."""
        return []


def methods_of(passes: Sequence[Pass], name: str) -> list[Callable[..., Any]]:
    """Return the method of each pass that has one of its own: the others are not asked in a step."""
    return [getattr(one, name) for one in passes if getattr(type(one), name) is not getattr(Pass, name)]
