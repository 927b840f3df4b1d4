"""Completions for people to read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.files import write_atomically
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.rollout import Rollout

WIDTH = 60
"""Characters of a text in the log."""


def gather_samples(rollout: Rollout, mesh: Mesh) -> list[dict[str, Any]]:
    """Collective over the data- and context-parallel ranks: on the first, all samples with their rewards, in order."""
    mine = {
        number: [
            {
                "problem": group.prompt.problem.problem_id,
                "prompt": group.prompt.problem.prompt,
                "answer": group.prompt.problem.answer,
                "completion": completion.text,
                "reward": reward,
                "tokens": len(completion.tokens_T),
                "finish": completion.finish,
                "policy_version": completion.policy_version,
            }
            for completion, reward in zip(group.completions, rollout.rewards_PG[number].tolist(), strict=True)
        ]
        for number, group in rollout.groups.items()
    }
    axis = mesh.dp_cp
    boxes: list[Mapping[int, list[dict[str, Any]]] | None] = [None] * axis.size
    dist.gather_object(mine, boxes if axis.rank == 0 else None, group=axis.group, group_dst=0)
    found = {number: samples for box in boxes if box for number, samples in box.items()}
    return [sample for number in sorted(found) for sample in found[number]]


def write_samples(folder: Path, step: int, samples: Sequence[Mapping[str, Any]]) -> Path:
    """`folder/step_<step>.jsonl`, all of it at once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:07d}.jsonl"
    lines = [json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples]
    write_atomically(path, "".join(lines))
    return path


def shown(samples: Sequence[Mapping[str, Any]], count: int) -> Iterator[str]:
    """Lines of a table: `count` samples spread over all, the best and the worst among them."""
    ordered = sorted(samples, key=lambda sample: -sample["reward"])
    count = min(count, len(ordered))
    places = [round(index * (len(ordered) - 1) / max(1, count - 1)) for index in range(count)]
    for sample in (ordered[place] for place in places):
        texts = (_short(sample[name]) for name in ("prompt", "completion", "answer"))
        prompt, completion, answer = texts
        yield f"reward {sample['reward']:6.3f} | {prompt} -> {completion} | answer {answer}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDTH else flat[: WIDTH - 3] + "..."
