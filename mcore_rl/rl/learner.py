"""From a rollout to updates: microbatches, old and reference logprobs, advantages, optimizer steps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.parallel.schedule import Routing, run_pass
from mcore_rl.rl.batch import PolicyMicrobatch, deliver, make_microbatch
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.objectives.advantages import group_advantages, kl_penalised, step_advantages
from mcore_rl.rl.objectives.aggregation import BatchTotals, sequence_weights
from mcore_rl.rl.objectives.diagnostics import kl_estimate
from mcore_rl.rl.objectives.heads import LogprobHead, PolicyHead
from mcore_rl.rl.plan import Rows, plan_minibatches
from mcore_rl.rl.policy_routes import PolicyRoutes
from mcore_rl.rl.reference import Reference
from mcore_rl.rl.rollout import Rollout
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport, train_step

ROW_MULTIPLE = 64
"""Rows are filled up to a multiple of this: the kernels of matrix products are compiled for each number of rows on a
CPU, and the fast ones are for round numbers, there and on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The samples of one optimizer step."""

    microbatches: list[PolicyMicrobatch]
    """This rank's."""
    totals: BatchTotals
    """Of the world."""
    weights_N: Tensor
    """float64: of each sample's tokens; N counts the whole rollout's samples, of which others have zeros."""
    num_samples: int
    num_positions: int
    """Of the world's samples."""
    mean_length: float
    """That a position sees on average: sum of squares / sum."""

    is_fresh: bool = False
    """Its only update is made by the old policy itself, whose logprobs no pass has computed before."""

    def with_old(self, logprobs: Sequence[Tensor]) -> "Minibatch":
        """The old policy's logprobs `[T]` of each microbatch; none on stages before the last, which need none."""
        return self._with([{"old_logprobs_T": one_T} for one_T in logprobs])

    def with_reference(self, logprobs: Sequence[Tensor]) -> "Minibatch":
        """As `with_old`, the reference's."""
        return self._with([{"reference_logprobs_T": one_T} for one_T in logprobs])

    def _with(self, fields: Sequence[dict[str, Any]]) -> "Minibatch":
        if not fields:
            return self
        paired = zip(self.microbatches, fields, strict=True)
        return replace(self, microbatches=[replace(one, **values) for one, values in paired])


Advantages = Tensor | Mapping[int, Tensor]
"""Of each sample of a rollout, `[N]`; or, by number, of each position of the samples that this rank trains on."""
RoutedPass = Callable[[Sequence[PolicyMicrobatch]], AbstractContextManager[Routing]]


class Learner:
    """Every method is collective over the world."""

    def __init__(
        self, state: TrainState, config: RlRunConfig, reference: Reference | None, routes: PolicyRoutes
    ) -> None:
        self.state = state
        self.config = config
        self.reference = reference
        self.routes = routes
        mesh, loss = state.mesh, config.rl.loss
        self._logprob_head = LogprobHead(
            mesh,
            config.model.vocab_size,
            temperature=config.rl.rollout.temperature,
            chunk_tokens=loss.logprob_chunk_tokens,
        )
        self._policy_head = PolicyHead(self._logprob_head, mesh, loss)
        self._rows = Rows(
            length=config.packed_length,
            unit=lcm(config.packed_multiple, ROW_MULTIPLE),
            span_multiple=config.mesh.zigzag,
            microbatch_multiple=mesh.pp.size if config.mesh.vpp > 1 else 1,
            equally_long=mesh.pp.size > 1,
        )
        self._num_microbatches = 0
        self._dp_ranks = [0] * mesh.dp_cp.size
        """Data-parallel rank of each rank of dp_cp."""
        dist.all_gather_object(self._dp_ranks, mesh.dp.rank, group=mesh.dp_cp.group)

    def minibatches(self, rollout: Rollout) -> list[Minibatch]:
        """The rollout in optimizer steps; each sample is on one data-parallel rank."""
        config, mesh, device = self.config, self.state.mesh, self.state.platform.device
        shapes = [rollout.shapes[number] for number in range(len(rollout.shapes))]
        plans = plan_minibatches(
            [shape.num_positions for shape in shapes],
            config.rollout_size // config.train.global_batch,
            mesh.dp.size,
            self._rows,
        )
        wanted = [[number for plan in plans for number in plan.samples_of(rank)] for rank in self._dp_ranks]
        samples = deliver(rollout.samples(), rollout.shapes, wanted, mesh.dp_cp, device)
        lengths_N = torch.tensor([shape.num_trained for shape in shapes])
        minibatches = []
        for plan in plans:
            is_in_N = torch.zeros(len(shapes), dtype=torch.bool)
            is_in_N[[number for rank in range(mesh.dp.size) for number in plan.samples_of(rank)]] = True
            lengths_here_N = lengths_N.where(is_in_N, 0)
            positions = [shape.num_positions for shape, here in zip(shapes, is_in_N, strict=True) if here]
            totals = BatchTotals(int(lengths_here_N.sum()), int((lengths_here_N > 0).sum()))
            minibatches.append(
                Minibatch(
                    microbatches=[
                        make_microbatch(samples, row, self._rows, mesh.cp, device)
                        for row in plan.rows[mesh.dp.rank]
                    ],
                    totals=totals,
                    weights_N=self._weights(lengths_here_N, totals),
                    num_samples=int(is_in_N.sum()),
                    num_positions=sum(positions),
                    mean_length=sum(length**2 for length in positions) / max(1, sum(positions)),
                )
            )
        self.routes.begin(rollout, [one for minibatch in minibatches for one in minibatch.microbatches])
        return minibatches

    def with_logprobs(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """The same with the logprobs of the old policy, which the present one is, and of the reference."""
        if self.config.rl.update.old_logprobs == "rollout":
            minibatches = [
                one.with_old([microbatch.engine_logprobs_T for microbatch in one.microbatches])
                for one in minibatches
            ]
        else:
            # The first update is made by the old policy itself: its own pass gives the old logprobs.
            first = 1 if self._first_is_fresh else 0
            with self.state.timers.phase("old_logprobs"):
                scored = [
                    one.with_old(self._logprobs(one, self.routes.old_policy)) if one.num_samples else one
                    for one in minibatches[first:]
                ]
            minibatches = [*(replace(one, is_fresh=True) for one in minibatches[:first]), *scored]
        if self.reference is not None:
            with self.state.timers.phase("reference"), self.reference.installed():
                minibatches = [
                    one.with_reference(self._logprobs(one, self.routes.reference)) if one.num_samples else one
                    for one in minibatches
                ]
        return list(minibatches)

    def advantages(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> Advantages:
        """float64 `[N]`: of each sample, equal on all ranks; of each position with kind="steps"."""
        if self.config.rl.advantage.kind == "steps":
            return self._token_advantages(rollout, minibatches)
        rewards_PG, loss = rollout.rewards_PG, self.config.rl.loss
        if loss.kl_coeff and loss.kl_in == "reward":
            kl_N = self._kl_sums(rewards_PG.numel(), minibatches)
            rewards_PG = kl_penalised(rewards_PG, kl_N.view_as(rewards_PG), coeff=loss.kl_coeff)
        return group_advantages(rewards_PG, self.config.rl.advantage).advantages_PG.flatten()

    def update(self, minibatch: Minibatch, advantages: Advantages) -> StepReport | None:
        """One optimizer step; None: there is no token to train on (dynamic sampling has found no group with a signal,
        or all completions are truncated and masked), so the step is counted and changes nothing.
        """
        state = self.state
        if not minibatch.totals.num_tokens:
            state.progress.step += 1
            return None
        weighted = [
            one.weighted(advantages, minibatch.weights_N)
            if isinstance(advantages, Tensor)
            else one.weighted_tokens(advantages, minibatch.weights_N)
            for one in minibatch.microbatches
        ]
        with self.routes.update(weighted, is_old_policy=minibatch.is_fresh) as routing:
            report = train_step(state, weighted, self._policy_head, routing=routing)
        self._num_microbatches += len(weighted)
        state.progress.consumed_samples += minibatch.num_samples
        state.progress.consumed_tokens += report.count
        return report

    def refresh_reference(self) -> None:
        """The reference becomes the policy, when it is time to."""
        rollouts = self.config.rl.loss.reference_refresh_rollouts
        if self.reference is None or rollouts is None:
            return
        if self.state.progress.step % (rollouts * self.config.updates_per_rollout) == 0:
            self.reference.set(self.state.progress.step)

    def take_num_microbatches(self) -> int:
        """Of this rank's updates since the last call."""
        count, self._num_microbatches = self._num_microbatches, 0
        return count

    @property
    def _first_is_fresh(self) -> bool:
        """Whether nothing needs the first minibatch's old logprobs before or after its only update."""
        loss, replay = self.config.rl.loss, self.config.replay
        kl_before = bool(loss.kl_coeff) and loss.kl_in == "reward"
        routes_before = self.reference is not None and replay.kind == "r2" and replay.reference == "replay"
        return self.config.rl.update.epochs == 1 and not kl_before and not routes_before

    @torch.no_grad()
    def _logprobs(self, minibatch: Minibatch, routed: RoutedPass) -> list[Tensor]:
        """Of each microbatch under the modules' present weights, on the last pipeline stage; [] on others."""
        chunks, microbatches = self.state.chunks, minibatch.microbatches
        with evaluating(chunks), routed(microbatches) as routing:
            kept = run_pass(chunks, microbatches, self._logprob_head, backward=False, routing=routing)
        return [outputs["logprobs"] for outputs in kept]

    def _token_advantages(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> dict[int, Tensor]:
        config, size = self.config.rl.advantage, rollout.rewards_PG.shape[1]
        mine = {number for one in minibatches for batch in one.microbatches for number in batch.samples}
        advantages = {}
        for group in {number // size for number in mine}:
            shapes = [rollout.shapes[group * size + place] for place in range(size)]
            lengths = [shape.num_completion for shape in shapes]
            vectors = step_advantages(rollout.steps_PGI[group], lengths, ddof=config.ddof, eps=config.eps)
            for place, (shape, vector_C) in enumerate(zip(shapes, vectors, strict=True)):
                # A token stands where it is predicted: the first one at the prompt's last position.
                advantages[group * size + place] = pad(vector_C, (shape.num_prompt - 1, 0))
        return advantages

    def _weights(self, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        if not totals.num_tokens:
            return torch.zeros(len(lengths_N), dtype=torch.float64)
        loss = self.config.rl.loss
        norm_tokens = loss.aggregation_norm_tokens
        if norm_tokens == "auto":
            norm_tokens = self.config.rl.rollout.max_new_tokens
        return sequence_weights(lengths_N, totals, loss.aggregation_in_use, norm_tokens=norm_tokens)

    def _kl_sums(self, num_samples: int, minibatches: Sequence[Minibatch]) -> Tensor:
        """float64 `[N]`: KL of the old policy to the reference, summed over each completion."""
        mesh, device = self.state.mesh, self.state.platform.device
        sums_N = torch.zeros(num_samples, dtype=torch.float64, device=device)
        if mesh.is_last_stage:
            for one in (one for minibatch in minibatches for one in minibatch.microbatches if one.samples):
                assert one.old_logprobs_T is not None and one.reference_logprobs_T is not None
                kl_T = kl_estimate(
                    one.old_logprobs_T, one.reference_logprobs_T, self.config.rl.loss.kl_estimator
                ).where(one.mask_T, 0.0)
                numbers_N = torch.tensor(one.samples, device=device)
                sums_N.index_add_(0, numbers_N[one.sequence_T], kl_T.double())
            dist.all_reduce(sums_N, group=mesh.dp_cp.group)
        if mesh.pp.size > 1:
            dist.broadcast(sums_N, group=mesh.pp.group, group_src=mesh.pp.size - 1)
        return sums_N.cpu()
