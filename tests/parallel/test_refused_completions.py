"""Completions that are left out of a rollout batch because of their routes: the rest trains as if they had not been.

Tokens beside the samples are the same on every mesh, with the routes that were changed by hand.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.loss import CriticConfig, GaeAdvantage
from mcore_rl.config.rl.rollout import RewardConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import LogConfig, TrainConfig
from mcore_rl.megatron.platform import start
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.model.build import copy_in
from mcore_rl.programs.open_run import open_run
from mcore_rl.rl.engines.base import Capabilities, QuietEngine, Sampling
from mcore_rl.rl.models.critic import load_critic
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.score import FailureReport, Reward
from mcore_rl.rl.rollouts.rollout import Rollouts, runs_rewards
from mcore_rl.rl.step.learner import Learner, OptionalParts, policy_logprobs
from mcore_rl.rl.step.policy_routes import PolicyRoutes
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.rl.types import Group, Prompt
from tests.parallel.parity import MESHES, Tensors, assembled, owned
from tests.parallel.rl_steps import GROUPS, SIZE, begin, rollout_of
from tests.parallel.test_rl_updates import config_of, weights
from tests.ranks import run_ranks
from tests.tiny_models import TINY

Routes = Mapping[int, Tensor | None]
"""Sample -> experts `[T, L, K]`; None: the engine returned none."""
FAILED = "failed"
"""Text of a completion that cannot be scored."""


def reward(given: RewardInput) -> float:
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
        given = rollout_of(config, 0, 1, has_segments=False).groups
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
    capabilities = Capabilities(max_tokens=100, routes=True, seeded=True)
    policy_version = 0

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {group.prompt.problem.problem_id: group for group in groups}

    def decode(self, tokens_T: Sequence[int], /) -> str:
        return "x" * len(tokens_T)

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        return [self._groups[prompt.problem.problem_id] for prompt in prompts]


class GivenPrompts:
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
        learner = Learner(run.state, config, routes, logprobs, OptionalParts(critic=load_critic(config, run)))
        RlTrainer(run, config, rollouts, learner, ()).run()
        pieces = owned(run.state)
    return pieces, list(read_records(folder / FILE_NAME))


MODEL = "deepseek_v3"
"""It has an expert bias, which every routed token moves, and layers without experts."""
N = GROUPS * SIZE
NUMBERS = ("train/grad_norm", "train/consumed_tokens", "critic/grad_norm", "critic/loss")
LOAD = "moe/load_max_over_mean"


@dataclass(frozen=True)
class Learned:
    weights: Tensors
    updates: list[dict[str, float]]
    refused: list[Any]
    lines: list[str]


def refusing(config: RlRunConfig, *, missing: str = "error", fraction: float = 0.2) -> RlRunConfig:
    """Steps as large as the gradient, so that weights show every difference, under R3."""
    rl = config.rl
    loss = rl.loss.model_copy(update={"kind": "grpo", "aggregation": "token_mean"})
    reward = RewardConfig(parts=("tests.parallel.test_refused_completions:reward",))
    return config.model_copy(
        update={
            "replay": ReplayConfig(kind="r3", missing=missing, max_refused_fraction=fraction),
            "optim": OptimConfig(lr=0.1, eps=1.0, schedule="constant", weight_decay=0.0),
            "log": LogConfig(interval=1),
            "rl": rl.model_copy(update={"loss": loss, "reward": reward}),
        }
    )


def of_steps(num_steps: int, mesh: MeshConfig, prompts: int = GROUPS, **update: Any) -> RlRunConfig:
    config = config_of(MODEL, mesh, replay="r3", **update)
    rollout = config.rl.rollout.model_copy(update={"prompts_per_step": prompts})
    train = TrainConfig(steps=num_steps, global_batch=prompts * SIZE // num_steps)
    return config.model_copy(update={"rl": config.rl.model_copy(update={"rollout": rollout}), "train": train})


@functools.cache
def honest() -> dict[int, Tensor]:
    # Observed routes are drawn too, so that the completions are the same.
    replay = ReplayConfig(kind="r2", observe_rollout=True, max_disagreement=None)
    config = config_of(MODEL, MeshConfig(), epochs=2).model_copy(update={"replay": replay})
    (routes,) = run_ranks(live_routes, 1, config, weights(MODEL, 1))
    assert [*routes] == [*range(N)]
    return routes


def wrong(sample: int) -> Tensor:
    """Experts that the trainer does not choose."""
    live_TLK = honest()[sample]
    num_experts = TINY[MODEL].moe.num_experts
    is_live_TLE = torch.zeros(*live_TLK.shape[:2], num_experts).scatter(-1, live_TLK, 1)
    return is_live_TLE.topk(live_TLK.shape[-1], largest=False).indices


def left_out(sample: int) -> Tensor:
    routes_TLK = honest()[sample].clone()
    routes_TLK[len(routes_TLK) // 2] = -1
    return routes_TLK


def texts(failed: tuple[int, ...] = ()) -> list[str]:
    return [FAILED if n in failed else str(n * 7919 % 100 / 100) for n in range(N)]


def learn(config: RlRunConfig, batch: Batch, folder: Path) -> Learned:
    ranks = run_ranks(learned, config.mesh.smallest_world, config, weights(MODEL, 1), batch, folder)
    records = ranks[0][1]
    updates = [one for one in records if "train/grad_norm" in one]
    return Learned(
        assembled([pieces for pieces, _ in ranks]),
        [
            {name: one[name] for name in one if name.startswith(("policy/", "values/")) or name in (*NUMBERS, LOAD)}
            for one in updates
        ],
        [one["rollout_routes/refused_completions"] for one in updates if one["step"] == 1],
        [one["event"] for one in records if "event" in one],
    )


def assert_same(found: Learned, wanted: Learned, *, biases: bool = True) -> None:
    """With `biases`, experts have worked on the same tokens, which move their biases."""
    assert LOAD in wanted.updates[-1]
    assert len(found.updates) == len(wanted.updates)
    for updates in zip(found.updates, wanted.updates, strict=True):
        one, other = ({name: x for name, x in each.items() if biases or name != LOAD} for each in updates)
        assert one == pytest.approx(other, rel=2e-6, abs=4 * 2**-21)
    for name, weight in wanted.weights.items():
        if biases or not name.endswith("expert_bias"):
            assert torch.allclose(found.weights[name], weight, rtol=0, atol=1e-7), name
    start = weights(MODEL, 1)
    assert max(float((wanted.weights[name] - one).abs().max()) for name, one in start.items()) > 1e-3


def traced(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "samples/step_0000000.jsonl").read_text().splitlines()
    return [sample for sample in map(json.loads, lines) if "log_ratios" in sample]


def in_groups(groups: Sequence[int], routes: Callable[[int], Tensor | None]) -> Routes:
    """Honest routes, but others of the completions of some groups."""
    return honest() | {n: routes(n) for n in range(N) if n // SIZE in groups}


@functools.cache
def without(groups: tuple[int, ...], num_steps: int, old_logprobs: str, folder: Path) -> Learned:
    """One rank's step on a batch that never had these groups."""
    prompts = [p for p in range(GROUPS) if p not in groups]
    config = refusing(of_steps(num_steps, MeshConfig(), len(prompts), old_logprobs=old_logprobs))
    found = learn(config, Batch(honest(), texts(), prompts), folder / f"{groups}-{num_steps}-{old_logprobs}")
    assert found.refused == [0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "num_steps"), [("1", 1), ("1", 2), ("tp2-pp2", 2), ("ep2", 2), ("cp2", 1)])
def test_wrong_routes_leave_an_update_as_it_is_of_the_batch_without_these_completions(
    mesh: str, num_steps: int, folder: Path, tmp_path: Path
) -> None:
    """With two steps the second half is compared in the pass for old logprobs, and then the first in its own update,
    whose gradients are thrown away, and the expert biases that it moved.
    """
    groups = (1,) if num_steps == 1 else (1, 4)
    config = refusing(of_steps(num_steps, MESHES[mesh]), fraction=0.35)
    found = learn(config, Batch(in_groups(groups, wrong), texts(), range(GROUPS)), tmp_path)
    assert found.refused == [SIZE * len(groups)]
    named = [line.split(":")[2].strip() for line in found.lines if line.startswith("warning: left out")]
    assert sorted(named) == sorted(f"sample {n}" for n in range(N) if n // SIZE in groups)
    for n, sample in enumerate(traced(tmp_path)):
        is_refused = n // SIZE in groups
        assert all(ratio is None for ratio in sample["log_ratios"]) == is_refused
        assert (sample["advantage"] is None) == is_refused
        assert not is_refused or sample["tokens"] == 1 or sample["changed_routes"]["rollout_routes"]
    assert_same(found, without(groups, num_steps, "trainer", folder))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1", "tp2-pp2"])
def test_with_refuse_completions_without_all_routes_are_left_out(mesh: str, folder: Path, tmp_path: Path) -> None:
    """The first completion of a group has no routes, and each of the others lacks a row."""
    config = refusing(of_steps(2, MESHES[mesh]), missing="refuse")
    routes = in_groups((4,), lambda n: None if n == 4 * SIZE else left_out(n))
    found = learn(config, Batch(routes, texts(), range(GROUPS)), tmp_path)
    assert found.refused == [SIZE]
    assert any(line.endswith("sample 16: the engine returned no routes") for line in found.lines)
    assert any("sample 17: the engine returned no routes of 1 of its" in line for line in found.lines)
    assert_same(found, without((4,), 2, "trainer", folder))


@pytest.mark.full
def test_one_completion_is_left_out_as_if_its_score_had_failed(tmp_path: Path) -> None:
    """The rest of its group has the advantages of a group of three. A completion without a score is in the passes, so
    that its tokens move the expert bias.
    """
    config = refusing(of_steps(1, MeshConfig()))
    batch = Batch(honest() | {5: wrong(5)}, texts(), range(GROUPS))
    found = learn(config, batch, tmp_path / "wrong")
    failed = learn(config, Batch(honest(), texts(failed=(5,)), range(GROUPS)), tmp_path / "failed")
    assert (found.refused, failed.refused) == ([1], [0])
    assert_same(found, failed, biases=False)


@pytest.mark.full
def test_with_sampled_old_logprobs_the_first_update_is_where_routes_are_compared(folder: Path, tmp_path: Path) -> None:
    config = refusing(of_steps(2, MeshConfig(), old_logprobs="rollout"))
    found = learn(config, Batch(in_groups((1,), wrong), texts(), range(GROUPS)), tmp_path)
    assert found.refused == [SIZE]
    assert_same(found, without((1,), 2, "rollout", folder))


def with_critic(config: RlRunConfig) -> RlRunConfig:
    critic = CriticConfig(optim=OptimConfig(lr=0.1, eps=1.0, schedule="constant", weight_decay=0.0))
    advantage = GaeAdvantage(critic=critic)
    return config.model_copy(update={"rl": config.rl.model_copy(update={"advantage": advantage})})


@pytest.mark.full
def test_a_critic_does_not_learn_from_completions_that_are_left_out(tmp_path: Path) -> None:
    """It learns before the policy does, so that the first minibatch has a pass for old logprobs."""
    found = learn(
        with_critic(refusing(of_steps(1, MeshConfig()))),
        Batch(in_groups((1,), wrong), texts(), range(GROUPS)),
        tmp_path / "wrong",
    )
    prompts = [p for p in range(GROUPS) if p != 1]
    wanted = learn(
        with_critic(refusing(of_steps(1, MeshConfig(), len(prompts)))),
        Batch(honest(), texts(), prompts),
        tmp_path / "never",
    )
    assert found.refused == [SIZE] and "critic/grad_norm" in wanted.updates[0]
    assert_same(found, wanted)


@pytest.mark.full
def test_missing_routes_are_known_before_a_critic_learns(tmp_path: Path) -> None:
    """Also with sampled old logprobs, where wrong ones are found in the policy's update, after it."""
    config = with_critic(refusing(of_steps(1, MeshConfig(), old_logprobs="rollout"), missing="refuse"))
    found = learn(config, Batch(in_groups((4,), left_out), texts(), range(GROUPS)), tmp_path / "missing")
    assert found.refused == [SIZE]
    with pytest.raises(AssertionError, match="4 of its 24 completions are refused, and 0 may be left out"):
        learn(config, Batch(in_groups((4,), wrong), texts(), range(GROUPS)), tmp_path / "wrong")


@pytest.mark.matrix("1-2-0.1")
@pytest.mark.parametrize(("num_wrong", "num_missing", "fraction"), [(3, 0, 0.1), (1, 0, 0.0), (0, 3, 0.1), (1, 2, 0.1)])
def test_more_than_the_allowed_share_ends_the_run(
    num_wrong: int, num_missing: int, fraction: float, tmp_path: Path
) -> None:
    routes = honest() | {n: wrong(n) for n in range(5, 5 + num_wrong)}
    routes |= {n: left_out(n) for n in range(15, 15 + num_missing)}
    config = refusing(of_steps(1, MeshConfig()), missing="refuse", fraction=fraction)
    reason = rf"The routes of {num_wrong + num_missing} of its 24 completions are refused, and {int(24 * fraction)} may"
    with pytest.raises(AssertionError, match=rf"(?s)RoutingError: Rollout batch at step 0: .*{reason}"):
        learn(config, Batch(routes, texts(), range(GROUPS)), tmp_path)


ODD = (0, 6)
"""Samples of which one row of routes is of other experts, the last: that of the token before the last."""


@functools.cache
def traced_on(mesh: str, traces: Path) -> list[dict[str, Any]]:
    routes = {n: honest()[n].clone() for n in range(N)}
    for n in ODD:
        routes[n][-1] = wrong(n)[-1]
    learn(refusing(of_steps(2, MESHES[mesh])), Batch(routes, texts(), range(GROUPS)), traces / mesh)
    path = traces / mesh / "samples/step_0000000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced_on")


@pytest.mark.full
def test_changed_routes_and_advantages_are_those_made_by_hand(traces: Path) -> None:
    samples = traced_on("1", traces)
    assert len(samples) == N
    for n, sample in enumerate(samples[: 4 * SIZE]):
        changed = sample["changed_routes"]["rollout_routes"]
        assert (sample["tokens"] - 2 in changed) == (n in ODD)
        assert len(sample["pieces"]) == len(sample["log_ratios"]) == sample["tokens"]
        group = samples[n // SIZE * SIZE : n // SIZE * SIZE + SIZE]
        mean = sum(one["reward"] for one in group) / SIZE
        assert (sample["advantage"] > 0) == (sample["reward"] > mean)
    assert all("pieces" not in sample for sample in samples[4 * SIZE :])


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2-pp2", "cp2"])
def test_tokens_are_the_same_on_every_mesh(mesh: str, traces: Path) -> None:
    for one, other in zip(traced_on(mesh, traces), traced_on("1", traces), strict=True):
        assert one.get("changed_routes") == other.get("changed_routes")
        if "log_ratios" in one:
            assert one["log_ratios"] == pytest.approx(other["log_ratios"], abs=2e-4)
            assert one["advantage"] == pytest.approx(other["advantage"], rel=1e-5)
