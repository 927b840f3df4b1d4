"""The interface of optional parts of a training step: a reference policy, teachers, a critic, texts ..."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from mcore_rl.megatron.schedule import Head
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.rl.objectives.losses import Objective
from mcore_rl.rl.passes.batch import Advantages, Minibatch, PolicyMicrobatch
from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.types import WaitingBytes
from mcore_rl.train.step import StepReport


class RewardKl(Protocol):
    """KL of the old policy to a reference, as a penalty on rewards."""

    @property
    def coeff(self) -> float:
        """Coefficient in this rollout batch."""

    def of_tokens(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return the KL `[T]` at each position of a microbatch, on the last stage."""

    def sums(self, num_samples: int, minibatches: Sequence[Minibatch]) -> Tensor:
        """Collective over the world: return the KL summed over each completion, float64 `[N]`."""


class Pass:
    """Base class for optional parts of a training step.

    The program creates the parts that the config asks for, and the learner calls their methods at fixed points of the
    step. Each method does nothing by default. Every method is collective over the world.
    """

    needs_old_logprobs = False
    """Whether it reads the first minibatch's old logprobs or routes outside that minibatch's only update."""

    learns_before_policy = False
    """Whether it trains on a rollout batch before the policy's first update."""

    reward_kl: RewardKl | None = None
    """KL penalty on rewards; None if it has no such penalty."""

    def holds_policy(self) -> str | None:
        """Reason why the policy is not trained on the rollout batch that begins at this step; None if it is trained."""
        return None

    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes that its frozen models take on this rank between passes."""
        return ()

    def add(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with an additional tensor, computed by a pass without gradient."""
        return list(minibatches)

    def before_updates(self, minibatches: Sequence[Minibatch], advantages: Advantages) -> list[Metric]:
        """Run after the advantages are known and before the policy's updates. Returns metrics."""
        return []

    def in_advantages(self, microbatch: PolicyMicrobatch) -> PolicyMicrobatch:
        """Return an update's microbatch with its contribution added to the advantages."""
        return microbatch

    def in_objective(self, objective: Objective) -> Objective:
        """Return the terms of an update's loss with its changes."""
        return objective

    def in_update(
        self,
        head: Head[Any],
        microbatches: Sequence[PolicyMicrobatch | LocalMicrobatch],
        num_tokens: int,
    ) -> tuple[Head[Any], Sequence[PolicyMicrobatch | LocalMicrobatch]]:
        """Return the head and microbatches of an update with its additions; the world trains on `num_tokens`."""
        return head, microbatches

    def after_updates(self, minibatches: Sequence[Minibatch], *, policy_has_learned: bool) -> list[Metric]:
        """Run after the last update of a rollout batch. Returns metrics."""
        return []

    def take_reports(self) -> list[StepReport]:
        """Return reports of its own model's optimizer steps since the last call."""
        return []


def methods_of(passes: Sequence[Pass], name: str) -> list[Callable[..., Any]]:
    """Return the bound method `name` of each pass that overrides it."""
    return [getattr(part, name) for part in passes if getattr(type(part), name) is not getattr(Pass, name)]
