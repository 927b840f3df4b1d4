"""Generation and scoring of completions, over all replicas of the model."""

import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.config.rl_run import RlConfig
from mcore_rl.data.answer_ends import step_tokens
from mcore_rl.megatron.agree import from_every_rank, from_first_of_model, on_every_rank
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.engines.base import Engine, Sampling, asking, wake
from mcore_rl.rl.rewards import score
from mcore_rl.rl.rewards.interface import TextStep
from mcore_rl.rl.rollouts import signal
from mcore_rl.rl.rollouts.prompts import PromptSource, own_positions
from mcore_rl.rl.types import Completion, Group, GroupSummary, Prompt, Rollout, SampleShape, StepReward

if TYPE_CHECKING:  # a run imports only what its config names
    from mcore_rl.rl.agents.hold import AgentSessions
    from mcore_rl.rl.environments.conversations import Conversations
    from mcore_rl.rl.models.served_teachers import ServedTeachers
    from mcore_rl.rl.rewards.from_model import RewardModels
    from mcore_rl.rl.rollouts.flow import GroupFlow


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReplicaScores:
    """A replica's scores, sent to all ranks; empty on ranks that score no completions."""

    summaries: list[GroupSummary] = field(default_factory=list)
    metrics: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, value and count of each metric."""
    num_failed: Counter[str] = field(default_factory=Counter)
    """Number of failed scores, by part."""
    first_failures: list[score.FailedPart] = field(default_factory=list)
    """The first failure of each kind."""


Baseline = Callable[["Rollouts", Sequence[Prompt]], tuple[Tensor, list[Metric]]]
"""Function that returns the reward `[P]`, float64, with which each prompt's completions are compared, NaN if its score
failed, and metrics. Collective over the world."""


@dataclass(kw_only=True, slots=True)
class Rollouts:
    """Generates and scores groups. Every method is collective over the world."""

    engine: Engine
    reward: score.Reward | None
    """Reward functions, on the rank of each replica that runs them (`runs_rewards`); None on all other ranks."""
    failures: score.FailureReport
    """Report of failed scores; only rank 0 of the world adds to it."""
    prompts: PromptSource
    sampling: Sampling
    mesh: Mesh
    rl: RlConfig
    seed: int
    updates_per_rollout: int
    """Optimizer steps between two rollout batches."""
    models: "RewardModels | None" = None
    """Reward parts that are models; None if there are none."""
    special_ids: frozenset[int] = frozenset()
    """Special tokens of the tokenizer."""
    conversations: "Conversations | AgentSessions | None" = None
    """Conversations with an environment, or sessions of an agent; None without them."""
    baseline: Baseline | None = None
    """Function that returns rewards to compare completions with; None: they are compared within their prompt."""
    teachers: "ServedTeachers | None" = None
    """Teachers on servers; None if there are none."""
    flow: "GroupFlow | None" = None
    """Groups that are generated while the policy trains; None: generation and training alternate."""

    def take(self, cursor: int) -> Rollout:
        """Generate and score the groups of the next rollout batch, which begins with prompt `cursor`. With dynamic
        sampling (DAPO, arXiv 2503.14476) groups of further prompts replace groups without a signal.
        """
        rollout = self.rl.rollout
        num_groups = rollout.prompts_per_step
        groups: dict[int, Group] = {}
        metrics: list[Metric] = []
        summaries: list[GroupSummary] = []
        chosen: list[GroupSummary] = []
        num_refills = -1
        most_refills = rollout.max_refills if rollout.dynamic_sampling else 0
        while num_refills < most_refills and len(chosen) < num_groups:
            num_refills += 1
            first = len(summaries)
            prompts = self.prompts.take(cursor + first, _refill_size(num_groups, len(chosen), first))
            if self.flow is None:
                seeds_PG = [self.seeds(cursor + first + p) for p in range(len(prompts))]
                generated, scored, measured = self.generate_and_score(
                    prompts, self.sampling, seeds_PG, first, is_training=True
                )
            else:
                generated, scored, measured = self._take_from(self.flow, cursor)
            groups |= generated
            summaries += scored
            # For the mean over replicas, a refill's seconds add to the first prompts' seconds.
            metrics += [
                replace(metric, count=0.0) if num_refills and metric.name.startswith("time/") else metric
                for metric in measured
            ]
            chosen = summaries
            scores_PG = rewards_of(summaries)
            if rollout.dynamic_sampling:
                if self.rl.samples_by_accuracy:
                    scores_PG = _accuracy_PG(summaries)
                chosen = [summaries[index] for index in signal.groups_to_train_on(scores_PG, num_groups)]
        if rollout.dynamic_sampling:
            metrics.append(Metric("rollout/refills", num_refills))
            metrics.append(Metric("rollout/unused_groups", len(summaries) - len(chosen)))
        rewards_PG = rewards_of(chosen).view(len(chosen), rollout.group_size)
        if rollout.group_size > 1:
            metrics += signal.group_metrics(rewards_PG)
        baseline_P = None
        if self.baseline is not None:
            baseline_P, measured = self.baseline(self, prompts)
            metrics += measured
            # A prompt without a baseline has no advantage: treat its completions as if their scores had failed.
            rewards_PG = rewards_PG.masked_fill(baseline_P.isnan()[:, None], torch.nan)
            scores_PG = torch.cat([rewards_PG, baseline_P[:, None]], dim=1)
        if self.rl.advantage.uses_steps:
            scores_PG = _steps_PN(summaries)
        return Rollout(
            groups={p: groups[summary.index] for p, summary in enumerate(chosen) if summary.index in groups},
            rewards_PG=rewards_PG,
            shapes={
                p * rollout.group_size + g: SampleShape(
                    replica_rank=summary.replica_rank,
                    num_prompt_tokens=summary.num_prompt_tokens,
                    num_completion_tokens=summary.lengths_G[g],
                    is_trained=not bool(rewards_PG[p, g].isnan())
                    and not (self.rl.loss.mask_truncated and summary.truncated_G[g]),
                    stale_spans=summary.stale_G[g],
                    is_truncated=summary.truncated_G[g],
                    teacher=summary.teacher,
                    sampled_spans=summary.spans_G[g],
                    segments=summary.segments_G[g],
                )
                for p, summary in enumerate(chosen)
                for g in range(rollout.group_size)
            },
            # Prompts after the last chosen group are used again in the next batch, because answers kept until then
            # would be from older weights.
            num_prompts=chosen[-1].index + 1 if len(chosen) == num_groups else len(summaries),
            metrics=metrics,
            steps_PGI=[summary.steps_GI for summary in chosen if summary.steps_GI],
            parts_PGK=torch.tensor([summary.parts_GK for summary in chosen], dtype=torch.float64)
            if self.rl.advantage.uses_parts
            else None,
            truncation_warning=self.truncation_warning(groups, summaries),
            signal=signal.signal_of(
                scores_PG, [is_correct for summary in summaries for is_correct in summary.correct_G]
            ),
            baseline_P=baseline_P,
        )

    def truncation_warning(self, groups: Mapping[int, Group], summaries: Sequence[GroupSummary]) -> str | None:
        """Return the likely reason why all completions of all replicas are truncated; None if some are not."""
        if not all(is_truncated for summary in summaries for is_truncated in summary.truncated_G):
            return None
        if self.conversations is not None:
            return signal.episodes_reason(groups.values(), self.sampling)
        return signal.truncation_reason(groups.values(), self.sampling, self.special_ids, self.engine.decode)

    def generate_and_score(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds_PG: Sequence[Sequence[int]],
        first: int = 0,
        *,
        is_training: bool = False,
    ) -> tuple[dict[int, Group], list[GroupSummary], list[Metric]]:
        """Generate and score a completion for each seed of each prompt of all replicas; `first` is the first prompt's
        index. With `is_training`, reward models update their running mean and deviation. Returns this replica's groups
        by index; summaries of all groups, in order; metrics of all replicas.
        """
        own = own_positions(len(prompts), self.mesh)
        wake(self.engine)
        start_s = time.perf_counter()
        generate = self.engine.generate if self.conversations is None else self.conversations.hold
        groups = generate([prompts[p] for p in own], sampling, [seeds_PG[p] for p in own])
        generation_s = time.perf_counter() - start_s
        return self._scored(
            {first + p: group for p, group in zip(own, groups, strict=True)},
            sampling,
            waited_s=generation_s,
            generation_s=generation_s,
            environment_s=None if self.conversations is None else self.conversations.environment_s,
            is_training=is_training,
        )

    def seeds(self, index: int) -> list[int]:
        """Return the seeds of the completions of prompt `index`."""
        group_size = self.rl.rollout.group_size
        return [sample_seed(self.seed, index, g) for g in range(group_size)]

    def update_weights(self, step: int) -> None:
        """Update the engine to the policy's weights after optimizer step `step`, and let further groups start."""
        if self.flow is None:
            self.engine.update_weights(step)
            return
        with self.flow.held():
            self.engine.update_weights(step)
        self.flow.admit(step // self.updates_per_rollout)

    def _take_from(self, flow: "GroupFlow", cursor: int) -> tuple[dict[int, Group], list[GroupSummary], list[Metric]]:
        start_s = time.perf_counter()
        groups, period_s = flow.take(cursor, asking(self.engine).of_stage)
        taken = self._scored(
            dict(zip(flow.own_positions, groups, strict=True)),
            self.sampling,
            waited_s=time.perf_counter() - start_s,
            generation_s=period_s,
            # Environments answer while the policy trains, so their time is not part of the waiting time.
            environment_s=None,
            is_training=True,
        )
        return *taken[:2], [*taken[2], *self._flow_metrics(flow, groups)]

    def _scored(
        self,
        by_index: dict[int, Group],
        sampling: Sampling,
        *,
        waited_s: float,
        generation_s: float,
        environment_s: float | None,
        is_training: bool,
    ) -> tuple[dict[int, Group], list[GroupSummary], list[Metric]]:
        """Score own groups for `generate_and_score`; `environment_s`, a part of `waited_s`, is None if unknown."""
        groups = list(by_index.values())
        generated_s = time.perf_counter()
        # If scoring fails on one replica, the error is raised on all ranks: they would otherwise wait for its scores.
        teachers = self.teachers if is_training else None
        teacher_metrics: list[Metric] = []
        asked = [] if teachers is None or self.reward is None else teachers.ask(groups)
        of_models = {} if self.models is None else self.models.outcomes(groups, are_counted=is_training)
        scores = on_every_rank(lambda: self.reward(groups, of_models) if self.reward and groups else None)
        scored_s = time.perf_counter()
        if teachers is not None:
            answers_PG = from_first_of_model(on_every_rank(lambda: teachers.answers(asked)), self.mesh)
            groups = [teachers.added(group, answers_G) for group, answers_G in zip(groups, answers_PG, strict=True)]
            by_index = dict(zip(by_index, groups, strict=True))
            refused_PG = [[answer is None for answer in answers_G] for answers_G in answers_PG]
            teacher_metrics = [
                Metric("time/teacher_servers_s", time.perf_counter() - scored_s),
                Metric("teacher/refused_completions", sum(map(sum, refused_PG))),
                Metric("teacher/retried_requests", teachers.take_retries()),
            ]
            if scores is not None:
                scores.leave_out(refused_PG)
        local = _ReplicaScores()
        if scores is not None:
            by_index = {
                index: replace(group, reasons_G=scores.reasons_PG[p])
                for p, (index, group) in enumerate(by_index.items())
            }
            summaries = self._summaries(by_index, scores)
            metrics = [
                *scores.metrics(),
                *signal.rollout_metrics(summaries, waited_s, generation_s),
                *signal.cut_metrics(groups, sampling.cut),
                *([] if self.conversations is None else signal.episode_metrics(groups, environment_s)),
                Metric("time/reward_s", scored_s - generated_s),
                *teacher_metrics,
            ]
            local = _ReplicaScores(
                summaries=summaries,
                metrics=[(metric.name, float(metric.value), float(metric.count)) for metric in metrics],
                num_failed=Counter(failed.part for failed in scores.failures),
                first_failures=list(score.first_of_each_kind(scores.failures)) if scores.failures else [],
            )
        gathered = from_every_rank(local)
        all_summaries = sorted(
            (summary for replica in gathered for summary in replica.summaries), key=lambda summary: summary.index
        )
        self._report_failures(gathered, sum(len(summary.rewards_G) for summary in all_summaries))
        return by_index, all_summaries, [Metric(*numbers) for replica in gathered for numbers in replica.metrics]

    def _report_failures(self, gathered: "Sequence[_ReplicaScores]", num_completions: int) -> None:
        """Report failures on rank 0. Raises TrainingError on all ranks if too many scores of a part have failed."""
        failures = [failed for replica in gathered for failed in replica.first_failures]
        if not failures:
            return
        if self.mesh.world.rank == 0:
            self.failures.add(failures)
        num_failed: Counter[str] = Counter()
        for replica in gathered:
            num_failed += replica.num_failed
        for part in num_failed.keys() - self.rl.deciding_parts:
            del num_failed[part]
        score.refuse_failing_parts(num_failed, num_completions, failures, self.rl.reward.max_failed_fraction)

    def _summaries(self, groups: dict[int, Group], scores: score.Scores) -> list[GroupSummary]:
        correctness_PG = scores.correct_PG
        if correctness_PG is None:
            correctness_PG = torch.full_like(scores.rewards_PG, torch.nan)
        correct_PG = [
            [None if math.isnan(value) else value == 1 for value in row_G] for row_G in correctness_PG.tolist()
        ]
        rewards_PG = scores.rewards_PG.tolist()
        has_steps, distill = self.rl.advantage.uses_steps, self.rl.distill
        parts_PGK = torch.stack(list(scores.parts.values()), dim=2).tolist() if self.rl.advantage.uses_parts else ()
        version = self.engine.policy_version
        return [
            GroupSummary(
                index=index,
                replica_rank=self.mesh.dp_cp.rank,
                num_prompt_tokens=len(group.prompt.tokens_T),
                lengths_G=[len(completion.tokens_T) for completion in group.completions],
                num_sampled_G=[completion.num_sampled for completion in group.completions],
                spans_G=[
                    None if completion.episode is None else completion.episode.spans for completion in group.completions
                ],
                segments_G=[completion.segments for completion in group.completions],
                truncated_G=[completion.is_truncated for completion in group.completions],
                rewards_G=rewards_PG[p],
                stale_G=[completion.stale_spans(version) for completion in group.completions],
                correct_G=correct_PG[p],
                steps_GI=[
                    token_steps(completion, steps, self.engine.decode, self.rl.reward.environment_weight)
                    for completion, steps in zip(group.completions, scores.steps_PG[p], strict=True)
                ]
                if has_steps
                else (),
                parts_GK=parts_PGK[p] if parts_PGK else (),
                # Prompts without a teacher are refused at the start.
                teacher=(distill.index_of(group.prompt.problem.fields.get(distill.tag_field)) or 0)
                if distill.teachers
                else 0,
            )
            for p, (index, group) in enumerate(groups.items())
        ]

    def _flow_metrics(self, flow: "GroupFlow", groups: Sequence[Group]) -> list[Metric]:
        """Collective over the world: return metrics of started groups and of staleness: the age of the oldest weights
        that sampled a completion, relative to the engine's current weights, in rollout batches.
        """
        now, updates = self.engine.policy_version, self.updates_per_rollout
        completions = (
            [completion for group in groups for completion in group.completions] if runs_rewards(self.mesh) else []
        )
        ages = [(now - completion.policy_version) / updates for completion in completions]
        num_mixed = sum(len({span.version for span in completion.versions}) > 1 for completion in completions)
        gathered = from_every_rank((flow.started, ages, num_mixed))
        started, ages_of_ranks, mixed_of_ranks = zip(*gathered, strict=True)
        all_ages = [age for ages in ages_of_ranks for age in ages]
        return [
            Metric("rollout/started_prompts", max(started)),
            Metric("rollout/staleness", sum(all_ages), len(all_ages)),
            Metric("rollout/staleness_max", max(all_ages)),
            Metric("rollout/mixed_versions_fraction", sum(mixed_of_ranks), len(all_ages)),
        ]


def runs_rewards(mesh: Mesh) -> bool:
    """Whether this rank runs the reward functions of its replica."""
    return mesh.tp.rank == 0 and mesh.pp.rank == 0


def sample_seed(seed: int, prompt_index: int, index: int) -> int:
    """Return a completion's seed, by the run's seed, the prompt's index, and the completion's index in its group."""
    digest = hashlib.blake2b(f"{seed}/{prompt_index}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a seed is a positive int64


def token_steps(
    completion: Completion, steps: Sequence[TextStep], decode: Callable[[Sequence[int]], str], environment_weight: float
) -> list[StepReward]:
    """Map the steps of the last turn's text to their last tokens; `steps` have sums of scores. In a conversation with
    an environment each turn is a step too, with its reward multiplied by `environment_weight`.
    """
    if not completion.num_sampled or not steps:
        return []
    start, stop = completion.sampled_spans[-1]
    num_before = completion.num_sampled - (stop - start)
    ends = step_tokens(completion.tokens_T[start:stop], completion.text, [step.end for step in steps], decode)
    found = [StepReward(num_before + end, step.value) for end, step in zip(ends, steps, strict=True)]
    if completion.episode is None:
        return found
    values: defaultdict[int, float] = defaultdict(float)
    num_before = 0
    for turn in completion.episode.turns if completion.episode.failure is None and environment_weight else ():
        num_before += turn.end - turn.start
        values[num_before - 1] += environment_weight * turn.reward
    for step in found:
        values[step.end] += step.value
    return [StepReward(end, values[end]) for end in sorted(values)]


def _refill_size(num_groups: int, num_chosen: int, num_taken: int) -> int:
    """Estimate, from the share of groups with a signal, how many further prompts are needed to fill a rollout batch."""
    if not num_chosen:
        return num_groups
    return min(num_groups, math.ceil((num_groups - num_chosen) * num_taken / num_chosen))


def _accuracy_PG(summaries: Sequence[GroupSummary]) -> Tensor:
    """Return 1 for a correct completion, 0 for an incorrect completion, NaN if undecided; float64."""
    return torch.tensor(
        [
            [math.nan if is_correct is None else float(is_correct) for is_correct in summary.correct_G]
            for summary in summaries
        ],
        dtype=torch.float64,
    )


def _steps_PN(summaries: Sequence[GroupSummary]) -> Tensor:
    """Return the values of all steps of each group, float64, padded with NaN."""
    steps_PN = [
        torch.tensor([step.value for steps in summary.steps_GI for step in steps], dtype=torch.float64)
        for summary in summaries
    ]
    return pad_sequence(steps_PN, batch_first=True, padding_value=torch.nan)


def rewards_of(summaries: Sequence[GroupSummary]) -> Tensor:
    """Return the rewards of groups of one size, float64 `[P, G]`; NaN if a score failed."""
    return torch.tensor([summary.rewards_G for summary in summaries], dtype=torch.float64)
