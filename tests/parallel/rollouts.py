"""Rollouts of a scripted engine on ranks; apart from its tests, so that ranks need not import them."""

from collections.abc import Sequence
from typing import Any

from mcore_rl.backend.platform import start
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl import PromptConfig, RewardConfig, RlConfig, RolloutConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.obs.metrics import reduced
from mcore_rl.parallel.mesh import build_mesh
from mcore_rl.rl.engines.base import Capabilities, Sampling
from mcore_rl.rl.prompts import TaskProblems, TaskPrompts
from mcore_rl.rl.rewards.failures import FailureReport
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.rollout import Rollouts, runs_rewards
from mcore_rl.rl.types import Completion, Group, Problem, Prompt, single_version

PROMPTS, SIZE = 4, 4


class ScriptedEngine:
    """An engine whose completions are as long as their seed says; every third prompt's are all of one length."""

    capabilities = Capabilities(max_tokens=100, routes=False, seeded=True)
    policy_version = 0

    def decode(self, tokens_T: Sequence[int], /) -> str:
        return "x" * len(tokens_T)

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> list[Group]:
        return [
            Group(prompt=prompt, completions=tuple(self._completion(prompt, seed) for seed in seeds))
            for prompt, seeds in zip(prompts, seeds_PG, strict=True)
        ]

    def _completion(self, prompt: Prompt, seed: int) -> Completion:
        number = int(prompt.problem.problem_id.rpartition("/")[2])
        length = 3 if number % 3 == 0 else 1 + seed % 7
        return Completion(
            text="x" * length,
            tokens_T=tuple(range(length)),
            logprobs_T=(-1.0,) * length,
            versions=single_version(self.policy_version, length),
            finish="length" if length == 7 else "stop",
        )


def encoded(problem: Problem) -> Prompt:
    return Prompt(problem=problem, tokens_T=tuple(problem.prompt.encode()))


def taken(mesh: MeshConfig, cursors: Sequence[int], rollout: dict[str, Any]) -> list[dict[str, Any]]:
    """On a rank: what is known of the rollouts from these cursors."""
    start(PlatformConfig())
    built = build_mesh(mesh)
    task = PromptConfig(task="reversing")
    reward = RewardConfig(parts=("length",), length_max_tokens=2)
    config = RlRunConfig(
        rl=RlConfig(
            prompts=task,
            reward=reward,
            rollout=RolloutConfig(prompts_per_step=PROMPTS, group_size=SIZE, max_new_tokens=7, **rollout),
        )
    )
    problems = TaskProblems(config=task, seed=1, held_out=frozenset())
    source = TaskPrompts(problems=problems, encode=encoded)
    told = []
    judge = Reward(reward, max_new_tokens=7) if runs_rewards(built) else None
    rollouts = Rollouts(
        engine=ScriptedEngine(),
        reward=judge,
        failures=FailureReport(str, folder=None),
        prompts=source,
        sampling=Sampling(max_new_tokens=7),
        mesh=built,
        config=config,
    )
    for cursor in cursors:
        one = rollouts.take(cursor)
        metrics = {
            name: x
            for name, x in reduced(one.metrics).items()
            if not name.endswith("_s") and "_per_s" not in name
        }
        told.append(
            {
                "rewards": one.rewards_PG.tolist(),
                "shapes": {
                    n: (s.num_prompt_tokens, s.num_completion_tokens, s.is_trained)
                    for n, s in one.shapes.items()
                },
                "prompts": {n: group.prompt.problem.problem_id for n, group in one.groups.items()},
                "lengths": {n: len(sample.tokens_T) for n, sample in one.samples().items()},
                "taken": one.num_prompts,
                "metrics": metrics,
            }
        )
    if judge is not None:
        judge.close()
    return told
