"""The way from a rollout to updates: microbatches, old and reference logprobs, advantages, optimizer steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import lcm
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.rl.advantage import DiscountedAdvantage, DividedAdvantage
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.packing import LENGTH_MULTIPLE, PackingLimits, plan_minibatches
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.schedule import Head, Routing, run_pass
from mcore_rl.replay.witness import proving
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.models.critic import Critic
from mcore_rl.rl.models.reference import Reference
from mcore_rl.rl.models.teachers import Teachers
from mcore_rl.rl.objectives.advantages import (
    above_greedy,
    group_advantages,
    kl_penalised_advantages,
    step_advantages,
)
from mcore_rl.rl.objectives.aggregation import BatchTotals, loss_weights
from mcore_rl.rl.objectives.diagnostics import kl_estimate
from mcore_rl.rl.objectives.kl_control import next_kl_coeff
from mcore_rl.rl.objectives.policy_tokens import LOG_RATIO_LIMIT, log_difference
from mcore_rl.rl.passes.batch import (
    Minibatch,
    PolicyMicrobatch,
    exchange_samples,
    make_microbatch,
    samples_of,
)
from mcore_rl.rl.passes.heads import LogprobHead, MixedHead, PolicyHead, TeacherHead
from mcore_rl.rl.passes.policy_routes import PolicyRoutes
from mcore_rl.rl.passes.texts import Texts
from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.update.objective import group_estimate, policy_objective
from mcore_rl.rl.update.token_advantages import Advantages, at_positions, token_advantages
from mcore_rl.train.loop import refuse_no_gradient
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport, train_step

CPU_LENGTH_MULTIPLE = 8
"""Packed sequences are padded to a multiple of this on a CPU, where padding costs time alone."""

RoutedPass = Callable[[Sequence[PolicyMicrobatch]], AbstractContextManager[Routing]]
"""Opens the routing of one pass over these microbatches: a method of `PolicyRoutes`."""


class Learner:
    """Makes a policy learn from rollouts. Every method is collective over the world."""

    def __init__(
        self,
        state: TrainState,
        config: RlRunConfig,
        reference: Reference | None,
        routes: PolicyRoutes,
        critic: Critic | None = None,
        *,
        vocab_size: int,
        teachers: Teachers | None = None,
        texts: Texts | None = None,
    ) -> None:
        """Prepare this rank.

        Args:
            state: the policy in training.
            config: the run's config.
            reference: the reference policy; None where there is no KL.
            routes: routing of the policy's passes.
            critic: the critic of rl.advantage.kind="gae"; None: there is none.
            vocab_size: number of ids that the tokenizer has; larger ones have no probability, as in the rollout.
            teachers: the teachers of rl.distill; None: there are none.
            texts: the texts of rl.ptx; None: there are none.
        """
        self.state = state
        self.config = config
        self.reference = reference
        self.routes = routes
        self.critic = critic
        self.teachers = teachers
        self._texts, self._vocab_size = texts, vocab_size
        mesh, loss = state.mesh, config.rl.loss
        self._logprob_head = LogprobHead(
            mesh,
            vocab_size,
            temperature=config.rl.rollout.temperature,
            chunk_tokens=loss.logprob_chunk_tokens,
        )
        self._objective = policy_objective(loss, config.rl.distill)
        self._limits = PackingLimits(
            max_tokens=config.packed_length,
            multiple=lcm(
                config.packed_multiple, LENGTH_MULTIPLE if state.platform.is_cuda else CPU_LENGTH_MULTIPLE
            ),
            sample_multiple=config.mesh.zigzag,
            microbatch_multiple=mesh.pp.size if config.mesh.vpp > 1 else 1,
            is_fixed=mesh.pp.size > 1,
        )
        self._dp_ranks = [0] * mesh.dp_cp.size
        """Data-parallel rank of each rank of dp_cp: a sample goes to all context-parallel ranks of its dp rank."""
        dist.all_gather_object(self._dp_ranks, mesh.dp.rank, group=mesh.dp_cp.group)

    def minibatches(self, rollout: Rollout) -> list[Minibatch]:
        """Cut the rollout into the minibatches of its optimizer steps, each sample on one data-parallel rank, and bring
        this rank its samples.
        """
        config, mesh, device = self.config, self.state.mesh, self.state.platform.device
        shapes = [rollout.shapes[index] for index in range(len(rollout.shapes))]
        plans = plan_minibatches(
            [shape.num_positions for shape in shapes],
            config.rollout_size // config.train.global_batch,
            mesh.dp.size,
            self._limits,
        )
        wanted = [[index for plan in plans for index in plan.samples_of(rank)] for rank in self._dp_ranks]
        samples = exchange_samples(rollout.samples(), rollout.shapes, wanted, mesh.dp_cp, device)
        minibatches = []
        for plan in plans:
            indices = [index for rank in range(mesh.dp.size) for index in plan.samples_of(rank)]
            num_trained_N = torch.zeros(len(shapes), dtype=torch.int64)
            num_trained_N[indices] = torch.tensor(
                [shapes[index].num_trained for index in indices], dtype=torch.int64
            )
            totals = BatchTotals(int(num_trained_N.sum()), int((num_trained_N > 0).sum()))
            lengths = [shapes[index].num_positions for index in indices]
            minibatches.append(
                Minibatch(
                    microbatches=[
                        make_microbatch(samples, microbatch, self._limits, mesh.cp, device)
                        for microbatch in plan.microbatches[mesh.dp.rank]
                    ],
                    totals=totals,
                    loss_weights_N=self._loss_weights(num_trained_N, totals),
                    num_samples=len(indices),
                    num_positions=sum(lengths),
                    mean_length=sum(length**2 for length in lengths) / max(1, sum(lengths)),
                )
            )
        return minibatches

    def with_old_logprobs(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with logprobs under the old policy, which is the policy as it is now.

        The first minibatch is left on-policy where its own update can give them: it is made by the old policy itself.
        """
        if self.config.rl.update.old_logprobs == "rollout":
            return [
                one.with_numbers("old_logprobs_T", [each.rollout_logprobs_T for each in one.microbatches])
                for one in minibatches
            ]
        is_imposed = self.config.replay.kind == "r3"
        num_on_policy = 1 if self._first_is_on_policy else 0
        on_policy = [replace(one, is_on_policy=True) for one in minibatches[:num_on_policy]]
        with self.state.timers.phase("old_logprobs"):
            return on_policy + [
                self._with_pass(minibatch, "old_logprobs_T", self.routes.old_policy, is_imposed=is_imposed)
                for minibatch in minibatches[num_on_policy:]
            ]

    @torch.no_grad()
    def logprobs(self, minibatch: Minibatch, routed: RoutedPass, *, is_imposed: bool) -> list[Tensor]:
        """Return logprobs `[T]` of each microbatch under the weights that the modules have now; on the last stage only.

        Args:
            minibatch: the samples.
            routed: opens the routing of the pass.
            is_imposed: whether that routing imposes routes, of which there is a proof.
        """
        chunks, microbatches = self.state.chunks, minibatch.microbatches
        with evaluating(chunks), routed(microbatches) as routing, self._proving(is_imposed=is_imposed):
            outputs = run_pass(chunks, microbatches, self._logprob_head, backward=False, routing=routing)
        return [one["logprobs"] for one in outputs]

    def with_reference_logprobs(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with logprobs under the reference policy, if there is one."""
        if self.reference is None:
            return list(minibatches)
        is_imposed = self.config.replay.reference == "replay"
        with self.state.timers.phase("reference"), self.reference.installed():
            return [
                self._with_pass(one, "reference_logprobs_T", self.routes.reference, is_imposed=is_imposed)
                for one in minibatches
            ]

    def with_teacher_logprobs(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with logprobs under the teacher of each prompt, if there are teachers."""
        if self.teachers is None:
            return list(minibatches)
        vocabulary = self.config.rl.distill.estimator == "vocabulary"
        head = TeacherHead(self._logprob_head, vocabulary=vocabulary)
        with self.state.timers.phase("teacher"):
            return self.teachers.with_logprobs(minibatches, rollout.shapes, head)

    def with_values(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with the critic's value before each token; without a critic, the same."""
        if self.critic is None:
            return list(minibatches)
        with self.state.timers.phase("values"):
            return self.critic.with_values(rollout, minibatches)

    def advantages(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> Advantages:
        """Return the advantages of each sample that this rank trains on, and with a critic its returns.

        All tokens of a completion have the same advantage, except with rl.advantage.kind="steps", "gae" and
        "reinforce_plus_plus...".
        """
        loss, advantage = self.config.rl.loss, self.config.rl.advantage
        if isinstance(advantage, DiscountedAdvantage):
            return token_advantages(
                advantage,
                loss.kl_estimator if loss.has_kl_in_reward else None,
                rollout,
                minibatches,
                self.state.mesh,
                self.state.platform.device,
                kl_coeff=self.kl_coeff,
            )
        group_size = rollout.rewards_PG.shape[1]
        samples = samples_of(minibatches)
        if isinstance(advantage, DividedAdvantage) and advantage.kind == "steps":
            by_sample = {}
            for p in sorted({index // group_size for index in samples}):
                shapes = [rollout.shapes[p * group_size + g] for g in range(group_size)]
                lengths = [shape.num_sampled for shape in shapes]
                tokens_GC = step_advantages(
                    rollout.steps_PGI[p], lengths, ddof=advantage.ddof, eps=advantage.eps
                )
                for g, (shape, tokens_C) in enumerate(zip(shapes, tokens_GC, strict=True)):
                    by_sample[p * group_size + g] = at_positions(tokens_C, shape)
            return Advantages(of_samples=by_sample)
        rewards_PG = rollout.rewards_PG
        kl_PG = None
        if loss.has_kl_in_reward:
            kl_PG = self._kl_sums(rewards_PG.numel(), minibatches).view_as(rewards_PG)
        if rollout.greedy_rewards_P is not None:
            penalised_PG = rewards_PG if kl_PG is None else rewards_PG - self.kl_coeff * kl_PG
            advantages_PG = above_greedy(penalised_PG, rollout.greedy_rewards_P)
        elif kl_PG is not None:
            advantages_PG = kl_penalised_advantages(
                rewards_PG,
                kl_PG,
                group_estimate(advantage),
                coeff=self.kl_coeff,
                spares_equal_others=advantage.kind == "leave_one_out_zscore",
            )
        else:
            advantages_PG = group_advantages(rewards_PG, group_estimate(advantage))
        advantages_N = advantages_PG.flatten()
        return Advantages(
            of_samples={
                index: advantages_N[index].expand(rollout.shapes[index].num_positions) for index in samples
            }
        )

    def update_critic(self, minibatches: Sequence[Minibatch], advantages: Advantages) -> list[StepReport]:
        """Train the critic, which there must be, towards the returns of a rollout batch; return its optimizer steps."""
        assert self.critic is not None
        with self.state.timers.phase("critic"):
            return self.critic.update(minibatches, advantages.returns)

    @property
    def critic_warms_up(self) -> bool:
        """Whether the critic alone is trained on the rollout batch that begins at this step."""
        rollouts = self.state.progress.step // self.config.updates_per_rollout
        section = self.config.critic
        return section is not None and rollouts < section.warmup_rollouts

    def optimizer_state_on_device(self) -> AbstractContextManager[None]:
        """Keep gradients and optimizer state on the device inside, so that they are moved once for all updates."""
        residence = self.state.residence
        return residence.for_updates() if residence.moves and not self.critic_warms_up else nullcontext()

    def skip_step(self) -> None:
        """Count an optimizer step in which the policy stays as it is."""
        self.state.progress.step += 1

    def update(self, minibatch: Minibatch, advantages: Advantages) -> StepReport | None:
        """Take one optimizer step on `minibatch`.

        Returns:
            What the step did. None where there is no token to train on (dynamic sampling has found no group with a
            signal, or all completions are truncated and masked): the step is counted and changes nothing.
        """
        progress = self.state.progress
        if not minibatch.totals.num_tokens:
            self.skip_step()
            return None
        microbatches = [
            self._with_teacher_advantages(
                one.with_advantages(advantages.of_samples, minibatch.loss_weights_N)
            )
            for one in minibatch.microbatches
        ]
        kind = self.config.replay.kind
        is_imposed = kind == "r3" or (kind == "r2" and not minibatch.is_on_policy)
        router_shift = None if minibatch.is_on_policy else self.routes.next_router_shift
        objective = self._objective
        if objective.kl is not None:  # rl.loss.kl_target may have changed the coefficient
            objective = replace(objective, kl=objective.kl._replace(coeff=self.kl_coeff))
        policy_head = PolicyHead(self._logprob_head, self.state.mesh, objective, router_shift)
        head: PolicyHead | MixedHead = policy_head
        texts = [] if self._texts is None else self._texts.microbatches(progress.step)
        if self._texts is not None:
            ratio = minibatch.totals.num_tokens / max(self._texts.num_tokens(texts), 1.0)
            head = MixedHead(
                policy_head,
                self.state.mesh,
                vocab_size=self._vocab_size,
                chunk_tokens=self.config.rl.loss.logprob_chunk_tokens,
                weight=self.config.rl.ptx.coeff * ratio,
            )
        mixed: list[PolicyMicrobatch | LocalMicrobatch] = [*microbatches, *texts]
        with (
            self.optimizer_state_on_device(),
            self.routes.update(mixed, is_old_policy=minibatch.is_on_policy) as routing,
            self._proving(is_imposed=is_imposed),
        ):
            report = train_step(
                self.state, mixed, cast("Head[PolicyMicrobatch | LocalMicrobatch]", head), routing=routing
            )
        refuse_no_gradient(report, progress.step)
        progress.consumed_samples += minibatch.num_samples
        progress.consumed_tokens += report.count
        return report

    def _with_teacher_advantages(self, one: PolicyMicrobatch) -> PolicyMicrobatch:
        """Return the microbatch with coeff x (log teacher - log old policy) added to its advantages, if asked for.

        Its mean, times the gradient of the policy's logprob, is minus the gradient of KL(policy || teacher).
        """
        distill = self.config.rl.distill
        if one.teacher_logprobs_T is None or distill.use != "advantage":
            return one
        assert one.advantages_T is not None and one.old_logprobs_T is not None
        gap_T = log_difference(one.teacher_logprobs_T, one.old_logprobs_T)
        gap_T = gap_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).where(one.mask_T, 0.0)
        return replace(one, advantages_T=one.advantages_T + distill.coeff * gap_T)

    def refresh_reference(self) -> None:
        """Make the policy the reference, every `rl.loss.reference_refresh_rollouts` rollout batches, and the teacher
        that is its earlier self, every `rl.distill.self_refresh_rollouts`.
        """
        step = self.state.progress.step
        earlier_self = None if self.teachers is None else self.teachers.earlier_self
        for reference, refresh_rollouts in (
            (self.reference, self.config.rl.loss.reference_refresh_rollouts),
            (earlier_self, self.config.rl.distill.self_refresh_rollouts),
        ):
            if reference is None or refresh_rollouts is None:
                continue
            if step % (refresh_rollouts * self.config.updates_per_rollout) == 0:
                reference.set(step)

    @property
    def kl_coeff(self) -> float:
        """Coefficient of the KL to the reference in this rollout batch."""
        controlled = self.state.progress.kl_coeff
        return self.config.rl.loss.kl_coeff if controlled is None else controlled

    def control_kl(self, minibatches: Sequence[Minibatch], *, policy_has_learned: bool) -> list[Metric]:
        """Collective over the world: change the KL coefficient by the KL of the rollout batch, with rl.loss.kl_target.

        Args:
            minibatches: the rollout batch, on the last stage with old and reference logprobs.
            policy_has_learned: whether the policy was trained on it. While a critic warms up it was not, and its
                distance from the reference says nothing yet.

        Returns:
            The coefficient that was in use, and the KL.
        """
        loss = self.config.rl.loss
        if loss.kl_target is None:
            return []
        num_completions = sum(one.num_samples for one in minibatches)
        kl_nats = self._kl_sums(num_completions, minibatches).sum().item() / max(num_completions, 1)
        metrics = [
            Metric("kl/coeff", self.kl_coeff),
            Metric("kl/completion", kl_nats),
        ]
        if num_completions and policy_has_learned:
            self.state.progress.kl_coeff = next_kl_coeff(
                self.kl_coeff,
                kl_nats,
                target=loss.kl_target,
                horizon=loss.kl_horizon,
                num_completions=num_completions,
            )
        return metrics

    @property
    def _first_is_on_policy(self) -> bool:
        """Whether nothing needs the first minibatch's old logprobs (or routes) before or after its only update."""
        loss, replay = self.config.rl.loss, self.config.replay
        kl_needs_them = bool(loss.kl_coeff) and (loss.kl_in == "reward" or loss.kl_target is not None)
        reference_replays = self.reference is not None and replay.reference == "replay"
        return (
            self.config.rl.update.epochs == 1
            and not kl_needs_them
            and not (self.teachers is not None and self.config.rl.distill.use == "advantage")
            and not (reference_replays and replay.kind == "r2")
        )

    def _proving(self, *, is_imposed: bool) -> AbstractContextManager[None]:
        """Return a proof that the pass inside imposes routes, or none, as the config says; dense models need none."""
        if not self.config.model.is_moe:
            return nullcontext()
        return proving(self.state.chunks, is_imposed=is_imposed)

    def _with_pass(
        self, minibatch: Minibatch, field: str, routed: RoutedPass, *, is_imposed: bool
    ) -> Minibatch:
        """Return the minibatch with logprobs under the weights that the modules have now as `field`."""
        if not minibatch.num_samples:
            return minibatch
        return minibatch.with_numbers(field, self.logprobs(minibatch, routed, is_imposed=is_imposed))

    def _loss_weights(self, num_trained_N: Tensor, totals: BatchTotals) -> Tensor:
        if not totals.num_tokens:
            return torch.zeros(len(num_trained_N), dtype=torch.float64)
        loss = self.config.rl.loss
        norm_tokens = loss.norm_tokens or self.config.rl.max_completion_tokens
        return loss_weights(num_trained_N, totals, loss.aggregation_in_use, norm_tokens=norm_tokens)

    def _kl_sums(self, num_samples: int, minibatches: Sequence[Minibatch]) -> Tensor:
        """Collective over the world: return the KL of the old policy to the reference, summed over each completion,
        trained on or not, float64 `[N]`.
        """
        mesh, device = self.state.mesh, self.state.platform.device
        sums_N = torch.zeros(num_samples, dtype=torch.float64, device=device)
        if mesh.is_last_stage:
            for one in (each for minibatch in minibatches for each in minibatch.microbatches):
                if not one.samples:
                    continue
                assert one.old_logprobs_T is not None and one.reference_logprobs_T is not None
                kl_T = kl_estimate(
                    one.old_logprobs_T, one.reference_logprobs_T, self.config.rl.loss.kl_estimator
                ).where(one.completion_mask_T, 0.0)
                samples_N = torch.tensor(one.samples, device=device)
                sums_N.index_add_(0, samples_N[one.sequence_T], kl_T.double())
            dist.all_reduce(sums_N, group=mesh.dp_cp.group)
        # Only the last stage has logprobs, and every stage needs the same advantages.
        if mesh.pp.size > 1:
            dist.broadcast(sums_N, group=mesh.pp.group, group_src=mesh.pp.size - 1)
        return sums_N.cpu()
