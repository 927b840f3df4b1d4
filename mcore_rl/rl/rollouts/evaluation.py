"""Evaluation on held-out prompts, the greedy baseline, and completions for people to read."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.rl.rollout import EvalConfig
from mcore_rl.errors import escaped
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.metrics.metrics import Metric
from mcore_rl.metrics.verdict import student_t
from mcore_rl.rl.rollouts.prompts import HELD_OUT_SEED
from mcore_rl.rl.rollouts.rollout import Rollouts, rewards_of, sample_seed
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion, Group, GroupSummary, Prompt
from mcore_rl.storage.files import checkpoint_errors_explained, write_atomically


def evaluate_policy(
    rollouts: Rollouts, prompts: Sequence[Prompt], config: EvalConfig
) -> tuple[dict[int, Group], list[GroupSummary]]:
    """Collective over the world: answer the prompts, with seeds that no rollout uses. Returns this replica's groups by
    prompt index, and the summaries of all groups.
    """
    sampling = replace(rollouts.sampling, cut=Cut(temperature=config.temperature), with_routes=False)
    seeds_PG = [
        [sample_seed(rollouts.seed, HELD_OUT_SEED + p, g) for g in range(config.samples)] for p in range(len(prompts))
    ]
    groups, summaries, _ = rollouts.generate_and_score(prompts, sampling, seeds_PG)
    return groups, summaries


def evaluation_metrics(summaries: Sequence[GroupSummary]) -> Iterator[Metric]:
    """Yield means, and pass@k for powers of two. Accuracy, reward and pass@k leave out answers with a failed score."""
    rewards = [reward for summary in summaries for reward in summary.rewards_G if not math.isnan(reward)]
    scored_PG = [[is_correct for is_correct in summary.correct_G if is_correct is not None] for summary in summaries]
    num_answers = sum(len(summary.lengths_G) for summary in summaries)
    num_scored = sum(map(len, scored_PG))
    if num_scored:
        yield Metric("eval/accuracy", sum(map(sum, scored_PG)), num_scored)
    if rewards:
        yield Metric("eval/reward", sum(rewards), len(rewards))
    rewards_PG = [[reward for reward in group.rewards_G if not math.isnan(reward)] for group in summaries]
    means_P = [statistics.fmean(rewards_G) for rewards_G in rewards_PG if rewards_G]
    if len(means_P) > 1:
        half = student_t(len(means_P) - 1) * statistics.stdev(means_P) / math.sqrt(len(means_P))
        yield Metric("eval/reward_half_width", half)
    yield Metric("eval/prompts", sum(1 for scored_G in scored_PG if scored_G))
    num_sampled = sum(sum(summary.num_sampled_G) for summary in summaries)
    yield Metric("eval/completion_tokens", num_sampled, num_answers)
    num_truncated = sum(sum(summary.truncated_G) for summary in summaries)
    yield Metric("eval/truncated_fraction", num_truncated, num_answers)
    k = 2
    while k <= len(summaries[0].correct_G):
        passes = [pass_at_k(sum(scored_G), len(scored_G), k) for scored_G in scored_PG if len(scored_G) >= k]
        if passes:
            yield Metric(f"eval/pass_at_{k}", sum(passes), len(passes))
        k *= 2


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Return the chance that any of k samples, drawn without replacement, is correct (arXiv 2107.03374, equation 1)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def greedy_baseline(rollouts: Rollouts, prompts: Sequence[Prompt]) -> tuple[Tensor, list[Metric]]:
    """Collective over the world: generate and score a greedy completion of each prompt (arXiv 2310.10505). Returns
    their rewards, float64 `[P]`, NaN where a score failed; and their metrics.
    """
    greedy = replace(rollouts.sampling, cut=Cut(temperature=0.0), with_routes=False)
    # Greedy decoding draws nothing, so the seed does not matter.
    _, summaries, _ = rollouts.generate_and_score(prompts, greedy, [[0] for _ in prompts])
    rewards_P = rewards_of(summaries)[:, 0]
    scored_P = rewards_P[~rewards_P.isnan()]
    return rewards_P, [Metric("rollout/greedy_reward", scored_P.sum().item(), len(scored_P))]


WIDTH = 60
"""Maximum number of characters of a text in the log."""


def gather_samples(groups: Mapping[int, Group], rewards_PG: Tensor, mesh: Mesh) -> list[dict[str, Any]]:
    """Collective over the data- and context-parallel ranks: gather all samples on the first rank, in order; all other
    ranks get an empty list. `groups` are this replica's, by index. A sample's reward is None if a score failed.
    """
    samples_of_groups = {
        index: [
            {
                "problem": group.prompt.problem.problem_id,
                "prompt": group.prompt.problem.prompt,
                "answer": group.prompt.problem.answer,
                "completion": completion.text,
                "reward": None if math.isnan(reward) else reward,
                **({"reasons": reasons} if reasons else {}),
                "tokens": completion.num_sampled,
                "prompt_ids": group.prompt.tokens_T,
                "ids": completion.tokens_T,
                "finish": completion.finish,
                "policy_version": completion.policy_version,
                **_conversation(completion),
                "versions": [[span.version, span.start, span.end] for span in completion.versions],
            }
            for completion, reward, reasons in zip(
                group.completions,
                rewards_PG[index].tolist(),
                group.reasons_G or [{}] * len(group.completions),  # a rank that scored nothing has no reasons
                strict=True,
            )
        ]
        for index, group in groups.items()
    }
    dp_cp = mesh.dp_cp
    gathered: list[Mapping[int, list[dict[str, Any]]] | None] = [None] * dp_cp.size
    dist.gather_object(samples_of_groups, gathered if dp_cp.rank == 0 else None, group=dp_cp.group, group_dst=0)
    everywhere = {index: samples for part in gathered if part for index, samples in part.items()}
    return [sample for index in sorted(everywhere) for sample in everywhere[index]]


def _conversation(completion: Completion) -> dict[str, Any]:
    """Return a conversation's messages, with the reward of each of the policy's turns, the (start, end) of these turns
    in its ids, and the reason why it ended. Empty for a completion without an environment.
    """
    episode = completion.episode
    if episode is None:
        return {}
    # The messages are the last segment's, whose turns are the last ones.
    num_answers = sum(message["role"] == "assistant" for message in episode.messages)
    rewards = iter([turn.reward for turn in episode.turns[-num_answers:]])
    turns = [
        {**message, "reward": next(rewards, None)} if message["role"] == "assistant" else message
        for message in episode.messages
    ]
    failure = {} if episode.failure is None else {"failure": episode.failure.text}
    segments = {"segments": completion.segments} if completion.segments else {}
    return {"turns": turns, "spans": episode.spans, **segments, "end": episode.end, **failure}


def write_samples(folder: Path, step: int, samples: Sequence[Mapping[str, Any]], kind: str = "step") -> Path:
    """Write `folder/<kind>_<step>.jsonl` atomically and return its path; CheckpointError where that is not possible."""
    path = folder / f"{kind}_{step:07d}.jsonl"
    lines = [json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples]
    with checkpoint_errors_explained(path, "writing"):
        folder.mkdir(exist_ok=True)  # no parents: a run's folder that was renamed is not made anew
        write_atomically(path, "".join(lines))
    return path


def table_lines(samples: Sequence[Mapping[str, Any]], count: int) -> Iterator[str]:
    """Yield a line for each of `count` samples, spaced evenly in order of reward from best to worst."""
    ordered = sorted(samples, key=lambda sample: (sample["reward"] is None, -(sample["reward"] or 0.0)))
    count = min(count, len(ordered))
    # Both ends are included: the first index is 0, the last index len - 1.
    indices = [round(row * (len(ordered) - 1) / max(1, count - 1)) for row in range(count)]
    for sample in (ordered[index] for index in indices):
        texts = [escaped(" ".join(sample[name].split())) for name in ("prompt", "completion", "answer")]
        prompt, completion, answer = (text if len(text) <= WIDTH else text[: WIDTH - 3] + "..." for text in texts)
        reward = "  none" if sample["reward"] is None else f"{sample['reward']:6.3f}"
        yield f"reward {reward} | prompt {prompt} | completion {completion} | answer {answer}"
