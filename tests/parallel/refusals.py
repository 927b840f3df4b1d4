"""A rollout batch of a scripted engine, some of whose routes are wrong or missing, through RlTrainer on any mesh: apart
from its tests, so that ranks need not import them.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.platform import start
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.model.global_tensors import copy_in
from mcore_rl.programs.open_run import open_run
from mcore_rl.programs.rl import critic_passes
from mcore_rl.rl.engines.base import Capabilities, QuietEngine, Sampling
from mcore_rl.rl.passes.policy_routes import PolicyRoutes
from mcore_rl.rl.rewards.failures import FailureReport
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.rollouts.rollout import Rollouts, runs_rewards
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.rl.types import Group, Prompt
from mcore_rl.rl.update.learner import Learner, policy_logprobs
from tests.parallel.parity import Tensors, owned
from tests.parallel.rl_steps import SIZE, begin, rollout_of

Routes = Mapping[int, Tensor | None]
"""Sample -> experts `[T, L, K]`; None: the engine returned none."""
FAILED = "failed"
"""Text of a completion that cannot be scored."""


def reward(given: RewardInput) -> float:
    """The number that a completion's text is."""
    return float(given.completion)


def live_routes(config: RlRunConfig, initial: Tensors) -> dict[int, Tensor]:
    """On a single rank: the experts `[T, L, K]` that routers with weights `initial` choose for each sample."""
    _, routes, _, _ = begin(config, initial)
    cache = routes._recorded
    assert cache is not None
    saved = {sample: cache.sample(0, sample) for sample in cache.samples(0)}
    return {n: cache.codes(one, torch.arange(len(one.position_n))).long() for n, one in saved.items()}


@dataclass(frozen=True)
class Batch:
    """The completions of `rollout_of` with these routes and texts, for some of its prompts."""

    routes: Routes
    texts: Sequence[str]
    prompts: Sequence[int]

    def groups(self, config: RlRunConfig) -> list[Group]:
        given = rollout_of(config, 0, 1).groups
        return [
            replace(
                given[p],
                completions=tuple(
                    replace(one, text=self.texts[p * SIZE + g], experts_TLK=self.routes[p * SIZE + g])
                    for g, one in enumerate(given[p].completions)
                ),
            )
            for p in self.prompts
        ]


class GivenEngine(QuietEngine):
    """An engine that returns the given completions."""

    capabilities = Capabilities(max_tokens=100, routes=True, seeded=True)
    policy_version = 0

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {group.prompt.problem.problem_id: group for group in groups}

    def decode(self, tokens_T: Sequence[int], /) -> str:
        return "x" * len(tokens_T)

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]
    ) -> list[Group]:
        return [self._groups[prompt.problem.problem_id] for prompt in prompts]


class GivenPrompts:
    """The prompts of the given completions, once."""

    skipped = ""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups, self.num_prompts = groups, len(groups)

    def take(self, cursor: int, count: int) -> list[Prompt]:
        return [group.prompt for group in self._groups[cursor : cursor + count]]


def learned(
    config: RlRunConfig, initial: Tensors, batch: Batch, folder: Path
) -> tuple[list[Any], list[dict[str, Any]]]:
    """On a rank: pieces of the weights after one rollout batch, and the records of the run's log."""
    config = config.model_copy(update={"run_dir": str(folder)})
    groups = batch.groups(config)
    platform = start(config.platform)
    with ExitStack() as stack:
        run = stack.enter_context(open_run(config, platform))
        mesh = run.state.mesh
        copy_in(run.state.chunks, initial)
        run.state.optimizer.reload_model_params()
        judge = None
        if runs_rewards(mesh):
            judge = stack.enter_context(Reward(config.rl.reward, max_new_tokens=12))
        rollouts = Rollouts(
            engine=GivenEngine(groups),
            reward=judge,
            failures=FailureReport(run.log.message, None),
            prompts=GivenPrompts(groups),
            sampling=Sampling(max_new_tokens=12),
            mesh=mesh,
            rl=config.rl,
            seed=config.train.seed,
            updates_per_rollout=config.updates_per_rollout,
        )
        routes, logprobs = (
            PolicyRoutes(run.state, config.rl, config.replay),
            policy_logprobs(run.state, config.rl, config.model.vocab_size),
        )
        learner = Learner(run.state, config, routes, logprobs, list(critic_passes(config, run)))
        RlTrainer(run, config, rollouts, learner, ()).run()
        pieces = owned(run.state)
    return pieces, list(read_records(folder / FILE_NAME))
