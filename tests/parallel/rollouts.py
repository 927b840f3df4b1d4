"""Rollouts of a scripted engine on ranks; apart from its tests, so that ranks need not import them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl.prompts import PromptConfig
from mcore_rl.config.rl.reward import RewardConfig
from mcore_rl.config.rl.rollout import RolloutConfig
from mcore_rl.config.rl.section import RlConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh, build_mesh
from mcore_rl.megatron.platform import start
from mcore_rl.metrics.metrics import reduced
from mcore_rl.programs.rollouts import make_flow
from mcore_rl.rl.engines.base import Capabilities, Engine, QuietEngine, Sampling
from mcore_rl.rl.rewards.failures import FailureReport
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.rollouts.prompts import TaskProblems, TaskPrompts
from mcore_rl.rl.rollouts.rollout import Rollout, Rollouts, runs_rewards
from mcore_rl.rl.types import Completion, Group, Problem, Prompt, single_version
from mcore_rl.train.state import Progress

PROMPTS, SIZE = 4, 4
PAUSE_S = 0.3


class ScriptedEngine(QuietEngine):
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


class SlowEngine(ScriptedEngine):
    """The same, which takes a while."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> list[Group]:
        time.sleep(PAUSE_S)
        return super().generate(prompts, sampling, seeds_PG)


class AskedEngine(ScriptedEngine):
    """The same, asked for one group at a time; from the prompt `broken` on it fails."""

    def __init__(self, mesh: Mesh, broken: int) -> None:
        self.asks = mesh.tp.rank == 0 and mesh.pp.rank == 0
        self._broken = broken

    def request_group(self, index: int, prompt: Prompt, sampling: Sampling, seeds_G: Sequence[int]) -> Group:
        assert self.asks and prompt.problem.problem_id == f"reversing/1/{index}"
        if index == self._broken:
            raise EngineError(f"no server answers for prompt {index}")
        return self.generate([prompt], sampling, [seeds_G])[0]

    def of_this_stage(self, group: Group) -> Group:
        return group


def encoded(problem: Problem) -> Prompt:
    return Prompt(problem=problem, tokens_T=tuple(problem.prompt.encode()))


@contextmanager
def opened(mesh: Mesh, engine: Engine, rollout: dict[str, Any]) -> Iterator[Rollouts]:
    """Rollouts of the engine, by rewards for short answers; an optimizer step is a rollout batch, five are the run."""
    task = PromptConfig(task="reversing")
    reward = RewardConfig(parts=("length",), length_max_tokens=2)
    config = RlRunConfig(
        train=TrainConfig(steps=5, global_batch=PROMPTS * SIZE),
        rl=RlConfig(
            prompts=task,
            reward=reward,
            rollout=RolloutConfig(prompts_per_step=PROMPTS, group_size=SIZE, max_new_tokens=7, **rollout),
        ),
    )
    problems = TaskProblems(config=task, seed=1, held_out=frozenset())
    judge = Reward(reward, max_new_tokens=7) if runs_rewards(mesh) else None
    yield Rollouts(
        engine=engine,
        reward=judge,
        failures=FailureReport(str, folder=None),
        prompts=TaskPrompts(problems=problems, encode=encoded),
        sampling=Sampling(max_new_tokens=7),
        mesh=mesh,
        rl=config.rl,
        seed=config.train.seed,
        updates_per_rollout=config.updates_per_rollout,
    )
    if judge is not None:
        judge.close()


def known(rollout: Rollout) -> dict[str, Any]:
    """What a rank knows of a rollout, but for times."""
    metrics = {
        name: x
        for name, x in reduced(rollout.metrics).items()
        if not name.endswith("_s") and "_per_s" not in name
    }
    return {
        "rewards": rollout.rewards_PG.tolist(),
        "shapes": {
            n: (s.num_prompt_tokens, s.num_completion_tokens, s.is_trained) for n, s in rollout.shapes.items()
        },
        "prompts": {n: group.prompt.problem.problem_id for n, group in rollout.groups.items()},
        "lengths": {n: len(sample.tokens_T) for n, sample in rollout.samples().items()},
        "taken": rollout.num_prompts,
        "metrics": metrics,
        "signal": rollout.signal,
    }


def taken(mesh: MeshConfig, cursors: Sequence[int], rollout: dict[str, Any]) -> list[dict[str, Any]]:
    """On a rank: what is known of the rollouts from these cursors."""
    start(PlatformConfig(layers="torch"))
    with opened(build_mesh(mesh), ScriptedEngine(), rollout) as rollouts:
        return [known(rollouts.take(cursor)) for cursor in cursors]


def waited_s(mesh: MeshConfig, rollout: dict[str, Any]) -> float:
    """On a rank: the seconds of generation of the first rollout batch."""
    start(PlatformConfig(layers="torch"))
    with opened(build_mesh(mesh), SlowEngine(), rollout) as rollouts:
        return float(reduced(rollouts.take(0).metrics)["time/rollout_s"])


def taken_from_flow(mesh: MeshConfig, staleness: int, broken: int) -> tuple[list[dict[str, Any]], str]:
    """On a rank: what is known of the rollouts of a flow, and the error that ends them."""
    start(PlatformConfig(layers="torch"))
    built = build_mesh(mesh)
    batches: list[dict[str, Any]] = []
    with (
        opened(built, AskedEngine(built, broken), {"max_staleness": staleness}) as rollouts,
        closing(make_flow(rollouts, Progress(), 5)) as rollouts.flow,
    ):
        try:
            while True:
                rollouts.update_weights(len(batches))
                batches.append(known(rollouts.take(len(batches) * PROMPTS)))
        except EngineError as error:
            return batches, str(error)
