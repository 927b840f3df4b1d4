"""Turns a rollout batch into updates: microbatches, old and reference logprobs, advantages, optimizer steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.data.packing import LENGTH_MULTIPLE, padded, plan_minibatches
from mcore_rl.megatron.agree import from_every_rank
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import MAX, Head, HeadOutput, ReadsDeferredLogits, signal_of
from mcore_rl.megatron.vocab import Logits
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.rl import batch
from mcore_rl.rl.step.losses import LOG_RATIO_LIMIT, Objective, PolicyTokens, loss_weights, policy_loss
from mcore_rl.rl.step.objective import RewardKl, estimator_of, policy_objective
from mcore_rl.rl.step.policy_routes import PolicyLogprobs, PolicyRoutes, RefusedCompletionsError
from mcore_rl.rl.types import Rollout
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport, compute_gradients, optimizer_step, refuse_no_gradient

if TYPE_CHECKING:  # a run imports only the parts that it has, when its program makes them
    from mcore_rl.rl.models.critic import Critic
    from mcore_rl.rl.models.reference import ReferencePass
    from mcore_rl.rl.models.teachers import Teachers
    from mcore_rl.rl.step.routing_split import RoutingSplits
    from mcore_rl.rl.step.texts import Texts


CPU_LENGTH_MULTIPLE = 8
"""On a CPU packed sequences are padded to a multiple of this many tokens; more padding would only cost time."""


class AddsTensor(Protocol):
    """A part with a pass of its own over a rollout batch, without gradient."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether this part reads the first minibatch's old logprobs or routes outside that minibatch's only update."""

    def add(self, rollout: Rollout, minibatches: Sequence[batch.Minibatch]) -> list[batch.Minibatch]:
        """Collective over the world: return the minibatches with an additional tensor."""


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


class PolicyHead(ReadsDeferredLogits):
    """Computes the policy's loss from the logprobs of `LogprobHead`. A microbatch without old logprobs is on-policy:
    its ratios are 1, with the gradient of the policy.
    """

    wants_losses = False

    def __init__(
        self,
        logprobs: batch.LogprobHead,
        mesh: Mesh,
        objective: Objective,
        router_shift: Callable[[], Tensor] | None = None,
        trace: Callable[[batch.PolicyMicrobatch, Tensor], None] | None = None,
    ) -> None:
        """Prepare the head. `router_shift` returns the ratio `[T]` of each next microbatch (None: 1); `trace` takes
        each microbatch with its logprobs `[T]`.
        """
        self._logprobs, self._mesh, self._objective = logprobs, mesh, objective
        self._router_shift, self._trace = router_shift, trace

    def count(self, microbatch: batch.PolicyMicrobatch) -> Tensor:
        """Return the number of trained tokens."""
        return microbatch.mask_T.sum().to(torch.int)

    def __call__(self, microbatch: batch.PolicyMicrobatch, output: Logits) -> HeadOutput:
        """Return the loss of one microbatch, with the sums and maxima of `update_statistics` as outputs."""
        assert microbatch.advantages_T is not None and microbatch.loss_weights_T is not None
        logprobs_T, entropy_T = self._logprobs.logprobs_and_entropy(microbatch, output, microbatch.inputs.rows_N)
        old_logprobs_T = microbatch.old_logprobs_T
        tokens = PolicyTokens(
            logprobs_T=logprobs_T,
            # Without an entropy bonus the entropy is only reported, and its backward would cost a pass over the logits.
            entropy_T=entropy_T if self._objective.entropy_coeff else entropy_T.detach(),
            old_logprobs_T=logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T,
            reference_logprobs_T=microbatch.reference_logprobs_T,
            rollout_logprobs_T=microbatch.rollout_logprobs_T,
            advantages_T=microbatch.advantages_T,
            mask_T=microbatch.mask_T,
            loss_weights_T=microbatch.loss_weights_T,
            sequence_T=microbatch.sequence_T,
            lengths_N=microbatch.lengths_N,
            router_shift_T=None if self._router_shift is None else self._router_shift(),
            teacher_logprobs_T=microbatch.teacher_logprobs_T,
            teacher_kl_T=self._logprobs.teacher_kl(microbatch, output, limit_nats=LOG_RATIO_LIMIT),
            teacher_forward_kl_T=self._logprobs.teacher_forward_kl(microbatch, output),
            is_stale_T=microbatch.is_stale_T,
        )
        if self._trace is not None:
            self._trace(microbatch, logprobs_T)
        loss = policy_loss(tokens, self._objective, self._mesh.cp)
        maxima = {MAX + name: value.detach() for name, value in loss.maxima.items()}
        outputs = loss.sums | maxima | signal_of(logprobs_T)
        return HeadOutput(loss=loss.loss, count=loss.count, outputs=outputs)


class Learner:
    """Trains a policy on rollout batches. Every method is collective over the world."""

    def __init__(
        self,
        state: TrainState,
        config: RlRunConfig,
        routes: PolicyRoutes,
        logprobs: PolicyLogprobs,
        parts: OptionalParts | None = None,
    ) -> None:
        self.state, self.config, self.routes = state, config, routes
        self.parts = parts or OptionalParts()
        self.held: str | None = None
        """Reason why the policy is not trained on the rollout batch that was prepared last; None if it is trained."""
        self._logprobs = logprobs
        mesh = state.mesh
        self._objective = policy_objective(config.rl.loss, config.rl.distill)
        self.advantages = estimator_of(
            config.rl.advantage,
            self.parts.reward_kl,
            mesh,
            state.platform.device,
            part_weights=config.rl.reward.part_weights,
        )
        multiple = lcm(config.packed_multiple, LENGTH_MULTIPLE if state.platform.is_cuda else CPU_LENGTH_MULTIPLE)
        self._limits = batch.limits_on(mesh, config.packed_length, multiple)
        self._dp_ranks = from_every_rank(mesh.dp.rank, mesh.dp_cp.group)
        """Data-parallel rank of each dp_cp rank: a sample goes to all context-parallel ranks of its dp rank."""

    def minibatches(self, rollout: Rollout) -> list[batch.Minibatch]:
        """Divide the rollout batch into minibatches, one an optimizer step, and fetch this rank's samples."""
        config, mesh, device = self.config, self.state.mesh, self.state.platform.device
        shapes = rollout.shapes
        plans = plan_minibatches(
            {
                n: sum(padded(length, self._limits.sample_multiple) for length in shape.segment_positions)
                for n, shape in shapes.items()
                if n not in rollout.refused
            },
            config.rollout_size // config.train.global_batch,
            mesh.dp.size,
            self._limits,
        )
        wanted = [[index for plan in plans for index in plan.samples_of(rank)] for rank in self._dp_ranks]
        samples = batch.exchange_samples(
            rollout.samples(), shapes, wanted, mesh.dp_cp, device, teacher_width=config.rl.distill.served_width
        )
        loss, minibatches = config.rl.loss, []
        for plan in plans:
            indices = [index for rank in range(mesh.dp.size) for index in plan.samples_of(rank)]
            num_trained_N = torch.zeros(len(shapes), dtype=torch.int64)
            num_trained_N[indices] = torch.tensor([shapes[index].num_trained for index in indices], dtype=torch.int64)
            totals = batch.BatchTotals(int(num_trained_N.sum()), int((num_trained_N > 0).sum()))
            lengths = [length for index in indices for length in shapes[index].segment_positions]
            loss_weights_N = torch.zeros(len(shapes), dtype=torch.float64)
            if totals.num_tokens:
                norm_tokens = loss.norm_tokens or config.rl.max_completion_tokens
                loss_weights_N = loss_weights(num_trained_N, totals, loss.aggregation_in_use, norm_tokens=norm_tokens)
            minibatches.append(
                batch.Minibatch(
                    microbatches=[
                        batch.make_microbatch(samples, microbatch, self._limits, mesh.cp, device)
                        for microbatch in plan.microbatches[mesh.dp.rank]
                    ],
                    totals=totals,
                    loss_weights_N=loss_weights_N,
                    num_samples=len(indices),
                    num_positions=sum(lengths),
                    mean_length=sum(length**2 for length in lengths) / max(1, sum(lengths)),
                )
            )
        return minibatches

    def with_old_logprobs(self, minibatches: Sequence[batch.Minibatch]) -> list[batch.Minibatch]:
        """Return the minibatches with logprobs under the old policy, which is the current policy; the first stays
        on-policy, without them, if only its own update needs them. Raises RefusedCompletionsError on all ranks, if the
        engine's routes belong to other completions.
        """
        if self.config.rl.update.old_logprobs == "rollout":
            return [
                minibatch.with_numbers(
                    "old_logprobs_T", [microbatch.rollout_logprobs_T for microbatch in minibatch.microbatches]
                )
                for minibatch in minibatches
            ]
        is_imposed, critic = self.config.replay.kind == "r3", self.parts.critic
        # The first is on-policy if it has a single update and nothing else needs its old logprobs or routes.
        first_is_on_policy = (
            self.config.rl.update.epochs == 1
            and not any(part.needs_old_logprobs for part in self.parts.with_passes)
            # A critic learns first, and must not learn from completions that the policy's update would refuse.
            and not (critic is not None and self.routes.judges_updates)
        )
        num_on_policy = int(first_is_on_policy)
        on_policy = [replace(minibatch, is_on_policy=True) for minibatch in minibatches[:num_on_policy]]
        with self.state.timers.phase("old_logprobs"):
            passed = [
                self._logprobs.added(minibatch, "old_logprobs_T", self.routes.old_policy, is_imposed=is_imposed)
                for minibatch in minibatches[num_on_policy:]
            ]
        self.routes.settle()
        return on_policy + passed

    def prepared(self, rollout: Rollout) -> list[batch.Minibatch]:
        """Return the minibatches of a rollout batch, with the outputs of all passes without gradient."""
        self.held = None if self.parts.critic is None else self.parts.critic.holds_policy()
        minibatches = self.minibatches(rollout)
        self.routes.begin(rollout, [microbatch for minibatch in minibatches for microbatch in minibatch.microbatches])
        minibatches = self.with_old_logprobs(minibatches)
        for part in self.parts.with_passes:
            minibatches = part.add(rollout, minibatches)
        return minibatches

    def before_updates(self, minibatches: Sequence[batch.Minibatch], advantages: batch.Advantages) -> list[Metric]:
        """Split the mismatch of the rollout and train the critic, where the config asks for them. Returns metrics."""
        splits, critic = self.parts.splits, self.parts.critic
        metrics = [] if splits is None else splits.before_updates(minibatches)
        return metrics + ([] if critic is None else critic.before_updates(minibatches, advantages))

    def after_updates(self, minibatches: Sequence[batch.Minibatch]) -> list[Metric]:
        """Split what updates moved, adapt the KL coefficient, refresh reference and teachers. Returns metrics."""
        parts, metrics = self.parts, []
        if parts.splits is not None:
            metrics += parts.splits.after_updates(minibatches)
        if parts.reference is not None:
            metrics += parts.reference.after_updates(minibatches, policy_has_learned=not self.held)
        if parts.teachers is not None:
            parts.teachers.refresh()
        return metrics

    def optimizer_state_on_device(self) -> AbstractContextManager[None]:
        """Context that keeps gradients and optimizer state on the device, to move them only once for all updates."""
        residence = self.state.residence
        return residence.for_updates() if residence.moves and not self.held else nullcontext()

    def update(self, minibatch: batch.Minibatch, advantages: batch.Advantages) -> StepReport | None:
        """Take one optimizer step on `minibatch`. Returns None if the policy is held, or there is no token to train on:
        the step is counted and changes nothing.

        Raises RefusedCompletionsError on all ranks, with the policy unchanged, if the engine's routes belong to other
        completions.
        """
        progress = self.state.progress
        if self.held or not minibatch.totals.num_tokens:
            progress.step += 1
            return None
        microbatches = [
            microbatch.with_advantages(advantages.of_samples, minibatch.loss_weights_N)
            for microbatch in minibatch.microbatches
        ]
        kind = self.config.replay.kind
        is_imposed = kind == "r3" or (kind == "r2" and not minibatch.is_on_policy)
        parts, objective = self.parts, self._objective
        if parts.teachers is not None:
            microbatches = [parts.teachers.in_advantages(microbatch) for microbatch in microbatches]
        if parts.reference is not None:
            objective = parts.reference.in_objective(objective)
        head: Head[Any] = PolicyHead(
            self._logprobs.head,
            self.state.mesh,
            objective,
            None if minibatch.is_on_policy else self.routes.next_router_shift,
            None if self.routes.trace is None else self.routes.trace.add_update,
        )
        mixed: Sequence[batch.PolicyMicrobatch | LocalMicrobatch] = microbatches
        if parts.texts is not None:
            head, mixed = parts.texts.in_update(head, mixed, minibatch.totals.num_tokens)
        with self.optimizer_state_on_device():
            with (
                self.routes.update(mixed, is_old_policy=minibatch.is_on_policy) as routing,
                self._logprobs.proving(is_imposed=is_imposed),
            ):
                gradients = compute_gradients(self.state, mixed, head, routing=routing)
            try:
                self.routes.settle()
            except RefusedCompletionsError:
                gradients.discard()
                raise
            report = optimizer_step(self.state, gradients)
        refuse_no_gradient(report, progress.step)
        progress.consumed_samples += minibatch.num_samples
        progress.consumed_tokens += report.count
        return report


def policy_logprobs(state: TrainState, rl: RlConfig, vocab_size: int) -> PolicyLogprobs:
    """Return the pass over the policy's modules; ids from `vocab_size` on have no probability, as in the rollout."""
    head = batch.LogprobHead(
        state.mesh, vocab_size, temperature=rl.rollout.temperature, chunk_tokens=rl.loss.logprob_chunk_tokens
    )
    return PolicyLogprobs(state.chunks, head, is_moe=state.config.model.is_moe)
