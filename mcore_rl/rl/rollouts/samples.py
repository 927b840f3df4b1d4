"""Human-readable completions: a JSON Lines file per rollout batch, and a table of a few samples in the log."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.errors import escaped
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.types import Completion
from mcore_rl.storage.files import write_atomically

WIDTH = 60
"""Maximum number of characters of a text in the log."""


def gather_samples(rollout: Rollout, mesh: Mesh) -> list[dict[str, Any]]:
    """Collective over the data- and context-parallel ranks: gather all samples on the first rank, in order.

    A sample has the token ids of its prompt and of the tokens after it, its reward (None if a score failed), and the
    reasons that the reward parts gave. All other ranks get an empty list.
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
                rollout.rewards_PG[index].tolist(),
                group.reasons_G or [{}] * len(group.completions),  # a rank that scored nothing has no reasons
                strict=True,
            )
        ]
        for index, group in rollout.groups.items()
    }
    dp_cp = mesh.dp_cp
    gathered: list[Mapping[int, list[dict[str, Any]]] | None] = [None] * dp_cp.size
    dist.gather_object(
        samples_of_groups, gathered if dp_cp.rank == 0 else None, group=dp_cp.group, group_dst=0
    )
    groups = {index: samples for part in gathered if part for index, samples in part.items()}
    return [sample for index in sorted(groups) for sample in groups[index]]


def _conversation(completion: Completion) -> dict[str, Any]:
    """Return a conversation's messages, with the reward of each of the policy's turns, the (start, end) of these turns
    in its ids, and the reason why it ended.

    Empty for a completion without an environment.
    """
    episode = completion.episode
    if episode is None:
        return {}
    rewards = iter([turn.reward for turn in episode.turns])
    turns = [
        {**message, "reward": next(rewards, None)} if message["role"] == "assistant" else message
        for message in episode.messages
    ]
    failure = {} if episode.failure is None else {"failure": episode.failure.text}
    return {"turns": turns, "spans": episode.spans, "end": episode.end, **failure}


def write_samples(folder: Path, step: int, samples: Sequence[Mapping[str, Any]]) -> Path:
    """Write `folder/step_<step>.jsonl` atomically and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:07d}.jsonl"
    lines = [json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples]
    write_atomically(path, "".join(lines))
    return path


def table_lines(samples: Sequence[Mapping[str, Any]], count: int) -> Iterator[str]:
    """Yield a line for each of `count` samples, spaced evenly in order of reward from best to worst."""
    ordered = sorted(samples, key=lambda sample: (sample["reward"] is None, -(sample["reward"] or 0.0)))
    count = min(count, len(ordered))
    # Both ends are included: the first index is 0, the last index len - 1.
    indices = [round(row * (len(ordered) - 1) / max(1, count - 1)) for row in range(count)]
    for sample in (ordered[index] for index in indices):
        prompt, completion, answer = (_shortened(sample[name]) for name in ("prompt", "completion", "answer"))
        reward = "  none" if sample["reward"] is None else f"{sample['reward']:6.3f}"
        yield f"reward {reward} | {prompt} -> {completion} | answer {answer}"


def _shortened(text: str) -> str:
    flat = escaped(" ".join(text.split()))
    return flat if len(flat) <= WIDTH else flat[: WIDTH - 3] + "..."
