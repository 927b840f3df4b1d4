"""A step's groups do not depend on how many replicas make them; dynamic sampling takes what has a signal."""

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl.rollout import PromptConfig, RewardConfig, RolloutConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh, build_mesh
from mcore_rl.megatron.platform import start
from mcore_rl.metrics.metrics import reduced
from mcore_rl.programs.rollouts import make_flow
from mcore_rl.rl.engines.base import Capabilities, Engine, QuietEngine, Sampling
from mcore_rl.rl.rewards.score import FailureReport, Reward
from mcore_rl.rl.rollouts.prompts import TaskProblems, TaskPrompts
from mcore_rl.rl.rollouts.rollout import Rollouts, runs_rewards
from mcore_rl.rl.types import Completion, Group, Problem, Prompt, Rollout, single_version
from mcore_rl.train.state import Progress
from tests.ranks import run_ranks

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

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
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

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
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

    def of_stage(self, group: Group, stage: int) -> Group:
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
        name: x for name, x in reduced(rollout.metrics).items() if not name.endswith("_s") and "_per_s" not in name
    }
    return {
        "rewards": rollout.rewards_PG.tolist(),
        "shapes": {n: (s.num_prompt_tokens, s.num_completion_tokens, s.is_trained) for n, s in rollout.shapes.items()},
        "prompts": {n: group.prompt.problem.problem_id for n, group in rollout.groups.items()},
        "lengths": {n: len(sample.tokens_T) for n, sample in rollout.samples().items()},
        "taken": rollout.num_prompts,
        "metrics": metrics,
        "signal": rollout.signal,
    }


def taken(mesh: MeshConfig, cursors: Sequence[int], rollout: dict[str, Any]) -> list[dict[str, Any]]:
    start(PlatformConfig(layers="torch"))
    with opened(build_mesh(mesh), ScriptedEngine(), rollout) as rollouts:
        return [known(rollouts.take(cursor)) for cursor in cursors]


def waited_s(mesh: MeshConfig, rollout: dict[str, Any]) -> float:
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


STEPS = [0, 3, 8]


@functools.cache
def alone(dynamic: bool) -> list[dict[str, Any]]:
    (rank,) = run_ranks(taken, 1, MeshConfig(), STEPS, {"dynamic_sampling": dynamic})
    return rank


@pytest.mark.matrix("dynamic-pp2-dp2")
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(dp=2), MeshConfig(tp=2), MeshConfig(cp=2), MeshConfig(pp=2, dp=2)],
    ids=["dp2", "tp2", "cp2", "pp2-dp2"],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_groups_are_those_of_one_replica(mesh: MeshConfig, dynamic: bool) -> None:
    ranks = run_ranks(taken, mesh.smallest_world, mesh, STEPS, {"dynamic_sampling": dynamic})
    for step, wanted in enumerate(alone(dynamic)):
        for found in (rank[step] for rank in ranks):
            for known_to_all in ("rewards", "shapes", "taken", "signal"):
                assert found[known_to_all] == wanted[known_to_all], known_to_all
            assert found["metrics"] == pytest.approx(wanted["metrics"])
        for share in ("prompts", "lengths"):
            whole = {number: x for rank in ranks for number, x in rank[step][share].items()}
            assert whole == wanted[share]


@pytest.mark.full
def test_dynamic_sampling_takes_the_first_groups_with_a_signal_and_says_what_it_left() -> None:
    ((plain,),) = run_ranks(taken, 1, MeshConfig(), [0], {})
    assert plain["taken"] == PROMPTS
    assert list(plain["prompts"].values()) == [f"reversing/1/{n}" for n in range(4)]
    assert plain["rewards"][0] == plain["rewards"][3] == [-0.5] * SIZE
    assert plain["metrics"]["reward/groups_without_signal_fraction"] == 0.5
    assert (plain["signal"].num_groups, plain["signal"].num_without_signal) == (4, 2)
    spreads = [statistics.pstdev(rewards) for rewards in plain["rewards"]]
    assert plain["metrics"]["reward/group_std"] == pytest.approx(statistics.mean(spreads))

    ((dynamic,),) = run_ranks(taken, 1, MeshConfig(), [0], {"dynamic_sampling": True})
    assert list(dynamic["prompts"].values()) == [f"reversing/1/{n}" for n in (1, 2, 4, 5)]
    # Two of four had a signal: two more are likely among four, and 6 and 7, of which there are too many, come again.
    assert dynamic["taken"] == 6
    assert all(len(set(rewards)) > 1 for rewards in dynamic["rewards"])
    assert dynamic["metrics"]["rollout/refills"] == 1
    assert dynamic["metrics"]["rollout/unused_groups"] == 4
    assert dynamic["metrics"]["reward/groups_without_signal_fraction"] == 0
    # Groups that are left out for want of a signal are counted among all that were generated: prompts 0 to 7.
    ((*batches,),) = run_ranks(taken, 1, MeshConfig(), [0, PROMPTS], {})
    num_equal = sum(len(set(rewards)) == 1 for batch in batches for rewards in batch["rewards"])
    assert (dynamic["signal"].num_groups, dynamic["signal"].num_without_signal) == (8, num_equal)

    ((few,),) = run_ranks(taken, 1, MeshConfig(), [0], {"dynamic_sampling": True, "max_refills": 1})
    assert few["taken"] == 6


@pytest.mark.full
def test_the_time_of_a_batch_has_its_refills() -> None:
    """There is one, as above; the mean is over the two replicas."""
    mesh = MeshConfig(dp=2)
    plain, refilled = (run_ranks(waited_s, 2, mesh, {"dynamic_sampling": dynamic})[0] for dynamic in (False, True))
    assert plain >= PAUSE_S
    assert refilled >= 2 * PAUSE_S


@pytest.mark.full
def test_dynamic_sampling_by_accuracy_replaces_groups_that_differ_in_their_length_alone() -> None:
    """DAPO asks for right and wrong answers; by the reward, four right ones of other lengths are trained on."""
    by = {"dynamic_sampling": True, "max_refills": 4}
    ((reward,),) = run_ranks(taken, 1, MeshConfig(), [0], by | {"dynamic_sampling_by": "reward"})
    ((accuracy,),) = run_ranks(taken, 1, MeshConfig(), [0], by | {"dynamic_sampling_by": "accuracy"})
    # An answer of at most two tokens has the reward 1 and is correct here.
    assert list(reward["prompts"].values()) == [f"reversing/1/{n}" for n in (1, 2, 4, 5)]
    for rewards in accuracy["rewards"]:
        assert 0 < sum(one >= 1 for one in rewards) < SIZE
    kept = set(accuracy["prompts"].values())
    assert any({one >= 1 for one in rewards} == {False} for rewards in reward["rewards"])
    assert not kept & {
        f"reversing/1/{n}"
        for n, rewards in zip((1, 2, 4, 5), reward["rewards"], strict=True)
        if not any(one >= 1 for one in rewards)
    }


@pytest.mark.matrix("tp2-pp2")
@pytest.mark.parametrize("mesh", [MeshConfig(dp=2), MeshConfig(tp=2, pp=2)], ids=["dp2", "tp2-pp2"])
def test_a_flow_gives_the_groups_of_turns_and_ends_all_ranks_where_one_replica_fails(mesh: MeshConfig) -> None:
    """The prompt 13 is of the second of two replicas, and of the fourth rollout batch; it starts with the third."""
    (wanted,) = run_ranks(taken, 1, MeshConfig(), [0, PROMPTS, 2 * PROMPTS], {})
    ranks = run_ranks(taken_from_flow, mesh.smallest_world, mesh, 1, 13)
    for batches, error in ranks:
        assert error == ("rank 1: " if mesh.dp == 2 else "rank 0: ") + "no server answers for prompt 13"
        assert 2 <= len(batches) == len(ranks[0][0]) <= 3
        for step, batch in enumerate(batches):
            for known_to_all in ("rewards", "shapes", "taken", "signal"):
                assert batch[known_to_all] == wanted[step][known_to_all], known_to_all
            started = batch["metrics"]["rollout/started_prompts"]
            assert (step + 1) * PROMPTS <= started <= (step + 2) * PROMPTS
            assert batch["metrics"]["rollout/staleness_max"] <= 1
    for share in ("prompts", "lengths"):
        for step in range(len(ranks[0][0])):
            whole = {number: x for batches, _ in ranks for number, x in batches[step][share].items()}
            assert whole == wanted[step][share]
