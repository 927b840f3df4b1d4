"""Prompts to judged completions, over all replicas of the model."""

import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.agree import on_every_rank
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.batch import SampleShape, TrainedSample
from mcore_rl.rl.engines.base import Engine, Sampling
from mcore_rl.rl.objectives.advantages import StepReward, constant_groups, groups_to_train_on
from mcore_rl.rl.prompts import PromptSource
from mcore_rl.rl.rewards.judged import TextStep
from mcore_rl.rl.rewards.score import Reward, Scores
from mcore_rl.rl.types import Completion, Group, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The groups that a step learns from, numbered alike on all ranks; sample g of group p is number p * G + g."""

    groups: dict[int, Group]
    """Those that this replica made."""
    rewards_PG: Tensor
    """float64: of all groups."""
    shapes: dict[int, SampleShape]
    """Of all samples."""
    num_prompts: int
    """Taken from the source."""
    metrics: list[Metric]
    """Of all replicas."""
    steps_PGI: Sequence[Sequence[Sequence[StepReward]]] = ()
    """Of all groups; empty unless rl.advantage.kind="steps"."""

    def samples(self) -> dict[int, TrainedSample]:
        """This replica's, to train on."""
        size = self.rewards_PG.shape[1]
        return {
            number * size + place: TrainedSample(
                tokens_T=torch.tensor(group.prompt.tokens_T + completion.tokens_T),
                num_prompt=len(group.prompt.tokens_T),
                engine_logprobs_C=torch.tensor(completion.logprobs_T, dtype=torch.float32),
                is_trained=self.shapes[number * size + place].is_trained,
            )
            for number, group in self.groups.items()
            for place, completion in enumerate(group.completions)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """What all ranks are told of a group."""

    place: int
    """Of its prompt among those taken."""
    holder: int
    """Rank, of the data- and context-parallel ones, whose replica made it."""
    num_prompt: int
    lengths_G: list[int]
    truncated_G: list[bool]
    rewards_G: list[float]
    solved_G: list[bool]
    """Where the first part of the reward is 1 or more."""
    steps_GI: Sequence[Sequence[StepReward]] = ()
    """Steps of each completion; empty unless rl.advantage.kind="steps"."""


class _Times(NamedTuple):
    rollout_s: float
    reward_s: float


@dataclass(kw_only=True, slots=True)
class Rollouts:
    """Makes and judges groups. Every method is collective over the world."""

    engine: Engine
    reward: Reward | None
    """On one rank of each replica (`judges`), which tells the others."""
    prompts: PromptSource
    sampling: Sampling
    mesh: Mesh
    config: RlRunConfig

    def take(self, cursor: int) -> Rollout:
        """The groups of the prompts from `cursor` on; with dynamic sampling of as many more as are needed."""
        rollout = self.config.rl.rollout
        wanted = rollout.prompts_per_step
        made: dict[int, Group] = {}
        told: list[GroupFacts] = []
        metrics: list[Metric] = []
        most_waves = 1 + (rollout.max_refills if rollout.dynamic_sampling else 0)
        for wave in range(most_waves):
            first = wave * wanted
            seeds_PG = [
                [
                    sample_seed(self.config.train.seed, cursor + first + p, g)
                    for g in range(rollout.group_size)
                ]
                for p in range(wanted)
            ]
            prompts = self.prompts.take(cursor + first, wanted)
            groups, facts, measured = self.judged(prompts, self.sampling, seeds_PG, first)
            made |= groups
            told += facts
            metrics += measured
            chosen = list(range(len(told)))
            if rollout.dynamic_sampling:
                chosen = groups_to_train_on(_rewards(told), wanted)
            if len(chosen) >= wanted:
                break
        if rollout.dynamic_sampling:
            metrics += [
                Metric("rollout/refills", wave),
                Metric("rollout/unused_groups", len(told) - len(chosen)),
            ]
        return self._numbered(made, [told[index] for index in chosen], len(told), metrics)

    def judged(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]], first: int = 0
    ) -> tuple[dict[int, Group], list[GroupFacts], list[Metric]]:
        """This replica's groups by the places (from `first`) of their prompts; facts of all groups, in order; metrics
        of all replicas.
        """
        replica = self.mesh.dp_cp
        places = range(replica.rank, len(prompts), replica.size)
        started_s = time.perf_counter()
        groups = self.engine.generate(
            [prompts[place] for place in places], sampling, [seeds_PG[place] for place in places]
        )
        rolled_out_s = time.perf_counter()
        scores = on_every_rank(lambda: self.reward(groups) if self.reward and groups else None)
        times = _Times(rolled_out_s - started_s, time.perf_counter() - rolled_out_s)
        mine = {first + place: group for place, group in zip(places, groups, strict=True)}
        box = None
        if scores is not None:
            facts = _facts(mine, replica.rank, scores)
            if self.config.rl.advantage.kind == "steps":
                facts = [
                    replace(one, steps_GI=_token_steps(group, steps_G, self.engine.decode))
                    for one, group, steps_G in zip(facts, groups, scores.steps_PG, strict=True)
                ]
            box = facts, _portable([*scores.metrics(), *_metrics(facts, times)])
        boxes: list[tuple[list[GroupFacts], list[tuple[str, float, float]]] | None]
        boxes = [None] * self.mesh.world.size
        dist.all_gather_object(boxes, box)
        found = [one for one in boxes if one is not None]
        told = sorted((fact for facts, _ in found for fact in facts), key=lambda fact: fact.place)
        return mine, told, [Metric(*numbers) for _, metrics in found for numbers in metrics]

    def _numbered(
        self, groups: dict[int, Group], chosen: list[GroupFacts], taken: int, metrics: list[Metric]
    ) -> Rollout:
        """The chosen groups, numbered in order."""
        mask_truncated = self.config.rl.loss.mask_truncated
        size = self.config.rl.rollout.group_size
        shapes = {
            number * size + place: SampleShape(
                holder=facts.holder,
                num_prompt=facts.num_prompt,
                num_completion=length,
                is_trained=not (mask_truncated and truncated),
            )
            for number, facts in enumerate(chosen)
            for place, (length, truncated) in enumerate(zip(facts.lengths_G, facts.truncated_G, strict=True))
        }
        rewards_PG = _rewards(chosen).view(len(chosen), size)
        without = constant_groups(rewards_PG).sum()
        return Rollout(
            groups={n: groups[facts.place] for n, facts in enumerate(chosen) if facts.place in groups},
            rewards_PG=rewards_PG,
            shapes=shapes,
            num_prompts=taken,
            metrics=[
                *metrics,
                Metric("reward/groups_without_signal_fraction", without, max(1, len(chosen))),
                Metric("reward/group_std", rewards_PG.std(dim=1, correction=0).sum(), max(1, len(chosen))),
            ],
            steps_PGI=[facts.steps_GI for facts in chosen if facts.steps_GI],
        )


def judges(mesh: Mesh) -> bool:
    """Whether this rank runs the reward functions of its replica."""
    return mesh.tp.rank == 0 and mesh.pp.rank == 0


def sample_seed(seed: int, prompt_number: int, place: int) -> int:
    """Of one completion: the same in a run that resumes, another for every prompt number and place."""
    digest = hashlib.blake2b(f"{seed}/{prompt_number}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def token_step(completion: Completion, step: TextStep, decode: Callable[[Sequence[int]], str]) -> StepReward:
    """The step by its last token: the first with which the text is as long as the step; of a step that ends with the
    text the completion's last token.
    """
    tokens_T = completion.tokens_T
    if step.end >= len(completion.text):
        return StepReward(len(tokens_T) - 1, step.value)
    # Prefixes grow with their tokens, so few of them need to be decoded.
    end = bisect_left(
        range(len(tokens_T) - 1), step.end, key=lambda place: len(decode(tokens_T[: place + 1]))
    )
    return StepReward(end, step.value)


def _token_steps(
    group: Group, steps_G: Sequence[Sequence[TextStep]], decode: Callable[[Sequence[int]], str]
) -> list[list[StepReward]]:
    return [
        [token_step(completion, step, decode) for step in steps]
        for completion, steps in zip(group.completions, steps_G, strict=True)
    ]


def _rewards(facts: Sequence[GroupFacts]) -> Tensor:
    return torch.tensor([one.rewards_G for one in facts], dtype=torch.float64)


def _facts(groups: Mapping[int, Group], holder: int, scores: Scores) -> list[GroupFacts]:
    correctness_PG = next(iter(scores.parts.values()))
    judged = zip(groups.items(), scores.rewards_PG.tolist(), (correctness_PG >= 1).tolist(), strict=True)
    return [
        GroupFacts(
            place=place,
            holder=holder,
            num_prompt=len(group.prompt.tokens_T),
            lengths_G=[len(completion.tokens_T) for completion in group.completions],
            truncated_G=[completion.is_truncated for completion in group.completions],
            rewards_G=rewards_G,
            solved_G=solved_G,
        )
        for (place, group), rewards_G, solved_G in judged
    ]


def _metrics(facts: Sequence[GroupFacts], times: _Times) -> list[Metric]:
    lengths = [length for one in facts for length in one.lengths_G]
    truncated = sum(is_truncated for one in facts for is_truncated in one.truncated_G)
    return [
        Metric("rollout/completion_tokens", sum(lengths), len(lengths)),
        Metric("rollout/longest_completion_tokens", max(lengths)),
        Metric("rollout/prompt_tokens", sum(one.num_prompt for one in facts), len(facts)),
        Metric("rollout/truncated_fraction", truncated, len(lengths)),
        Metric("rollout/tokens_per_s_per_replica", sum(lengths), times.rollout_s),
        Metric("time/rollout_s", times.rollout_s),
        Metric("time/reward_s", times.reward_s),
    ]


def _portable(metrics: Sequence[Metric]) -> list[tuple[str, float, float]]:
    return [(metric.name, float(metric.value), float(metric.count)) for metric in metrics]
