"""Samples on disk: what a run can be checked by afterwards."""

import json
from pathlib import Path

import torch

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.report.samples import before_and_after
from mcore_rl.rl.rollouts.evaluation import gather_samples, write_samples
from mcore_rl.rl.types import Episode, Group, Problem, Prompt, Rollout, Turn
from tests.unit.rl.groups import completion_of


def test_a_sample_on_disk_has_the_ids_of_its_prompt_and_of_the_tokens_after_it(one_rank: Mesh, tmp_path: Path) -> None:
    talk = Episode(messages=(), turns=(Turn(0, 1, 0.0), Turn(3, 5, 1.0)), end="done")
    completions = (completion_of("45", (4, 5, 2)), completion_of("7", (6, 9, 9, 7, 2), talk))
    problem = Problem(problem_id="p", prompt="13", answer="45")
    group = Group(prompt=Prompt(problem=problem, tokens_T=(1, 3)), completions=completions)
    rollout = Rollout(
        groups={0: group},
        rewards_PG=torch.tensor([[1.0, 0.0]], dtype=torch.float64),
        shapes={},
        num_prompts=1,
        metrics=[],
    )
    path = write_samples(tmp_path / "samples", 3, gather_samples(rollout.groups, rollout.rewards_PG, one_rank))
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["prompt_ids"], first["ids"], "spans" in first) == ([1, 3], [4, 5, 2], False)
    assert (second["prompt_ids"], second["ids"]) == ([1, 3], [6, 9, 9, 7, 2])
    sampled = [second["ids"][begin:end] for begin, end in second["spans"]]
    assert sampled == [[6], [7, 2]] and second["tokens"] == 3

    (with_ids,) = before_and_after(tmp_path)
    old = [{name: value for name, value in sample.items() if "ids" not in name} for sample in (first, second)]
    write_samples(tmp_path / "samples", 3, old)
    assert before_and_after(tmp_path) == [with_ids], "files of older versions have no ids"
