"""PPO's updates of policy and critic: those of transformers and autograd in float64, and the same on every mesh."""

import copy
import functools
import math
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.replay import ReplayKind
from mcore_rl.config.rl.loss import CriticConfig, DistillConfig, PtxConfig, UpdateConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.schedule import free_routing
from mcore_rl.model.build import copy_in, settle_weights
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.rl.frozen_model import FrozenModel
from mcore_rl.rl.models.critic import Critic, critic_routes
from mcore_rl.rl.models.reference import Reference
from mcore_rl.rl.models.teachers import Teachers
from mcore_rl.rl.rewards.from_model import Reading, RewardModel, RewardModelSource, whole_reader
from mcore_rl.rl.rewards.interface import Score
from mcore_rl.rl.step.learner import Learner, OptionalParts, policy_logprobs
from mcore_rl.rl.step.policy_routes import PolicyRoutes
from mcore_rl.rl.types import Completion, Group, Rollout
from mcore_rl.storage.checkpoints.write import save_weights
from mcore_rl.train.offload import all_present
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport
from tests.hf_models import Oracle, oracle
from tests.hf_weights import to_global
from tests.parallel.parity import MESHES, Tensors, assembled, owned, set_up_plain
from tests.parallel.rl_steps import (
    GROUPS,
    SIZE,
    reference_pass,
    replaced,
    rollout_of,
    run_config,
    sampled_positions,
    texts_pass,
    token_advantages,
)
from tests.ranks import run_ranks
from tests.rounding import change_by_an_ulp, fp32_rounding
from tests.sections import advantage_config, loss_config, with_critic
from tests.tiny_models import TINY, shallow
from tests.waiting import leaving

TRUNCATED = (0, 5, 10, 23)
"""Samples that reached the largest length."""


def truncated_rollout(config: RlRunConfig, dp_cp_rank: int, dp_cp_size: int) -> Rollout:
    """The ragged rollout of random tokens, some of whose completions have no end, and one no reward."""
    rollout = rollout_of(config, dp_cp_rank, dp_cp_size, has_segments=False)
    rewards_PG = rollout.rewards_PG.clone()
    rewards_PG[2, 1] = torch.nan  # sample 9, which is not trained on
    num_teachers = max(1, len(config.rl.distill.paths))
    shapes = {
        index: replace(shape, is_truncated=index in TRUNCATED, teacher=index % num_teachers)
        for index, shape in rollout.shapes.items()
    }
    return replace(rollout, rewards_PG=rewards_PG, shapes=shapes)


def initial_weights(config: RlRunConfig) -> list[Any]:
    """On a rank: the pieces of a new policy and a new critic, whose head is zero."""
    state = set_up_plain(config)
    assert state.critic is not None
    return [owned(state), owned(state.critic)]


def ppo_updates(config: RlRunConfig, weights: Sequence[Tensors], folder: Path) -> dict[str, Any]:
    """On a rank: what the updates of one rollout report, and the pieces of both models after them.

    Args:
        weights: of the policy, of the reference and of the critic, before.
    """
    state = set_up_plain(config)
    mesh, trained = state.mesh, state.critic
    assert trained is not None
    policy, other, values = weights
    copy_in(state.chunks, other)
    store = config.rl.loss.reference_store
    reference = Reference(state.chunks, mesh, config.model, folder, folder / "checkpoints", store=store)
    with all_present(state.residences):
        for one, tensors in ((state, policy), (trained, values)):
            copy_in(one.chunks, tensors)
            one.optimizer.reload_model_params()
    routes = PolicyRoutes(state, config.rl, config.replay)
    assert config.critic is not None
    critic = Critic(
        trained,
        state,
        config.critic,
        config.checkpoint,
        critic_routes(trained, config.rl, config.replay, config.critic),
        epochs=config.critic_epochs,
        updates_per_rollout=config.updates_per_rollout,
    )
    logprobs = policy_logprobs(state, config.rl, config.model.vocab_size)
    parts = OptionalParts(reference=reference_pass(config, reference, logprobs, routes, state), critic=critic)
    if config.rl.distill.paths:
        copy_in(state.chunks, other)
        other_path = save_weights(state.chunks, mesh, config.model, folder / "other")
        copy_in(state.chunks, policy)
        of_disk = FrozenModel(
            config.model,
            other_path,
            mesh,
            state.platform,
            config.platform,
            store=config.critic_store,
            verify_checksums=config.checkpoint.verify_checksums,
        )
        teachers = [of_disk, Reference(state.chunks, mesh, config.model, folder, folder)]
        of_teachers = Teachers(
            teachers, config.rl.distill, logprobs.head, state, updates_per_rollout=config.updates_per_rollout
        )
        parts = replace(parts, teachers=of_teachers)
    if config.rl.ptx.coeff:
        parts = replace(parts, texts=texts_pass(config, state))
    learner = Learner(state, config, routes, logprobs, parts)
    rollout = truncated_rollout(config, mesh.dp_cp.rank, mesh.dp_cp.size)
    minibatches = learner.prepared(rollout)
    advantages = learner.advantages(rollout, minibatches)
    critic_reports = critic.update(minibatches, advantages.returns)
    reports = [learner.update(minibatch, advantages) for minibatch in minibatches * config.rl.update.epochs]
    if config.critic_store == "host":
        assert not any(parameter.untyped_storage().nbytes() for parameter in parameters_of(trained))
    with all_present(state.residences):
        for one in (state, trained):
            settle_weights(one.chunks)
        return {
            "values": {metric.name: float(metric.value) for metric in advantages.metrics},
            "critic": [numbers(report) for report in critic_reports],
            "policy": [numbers(report) for report in reports if report is not None],
            "weights": {"policy": owned(state), "critic": owned(trained)},
            "scores": scores_of(rollout, trained, config, folder),
        }


def parameters_of(state: TrainState) -> list[Tensor]:
    return [parameter for chunk in state.chunks for parameter in chunk.parameters()]


def scores_of(rollout: Rollout, critic: TrainState, config: RlRunConfig, folder: Path) -> dict[int, list[float]]:
    """On a rank: the scores of this replica's groups, by index, by a reward model with the critic's weights: of each
    completion that at its last token, and those at every second token before.
    """
    path = save_weights(critic.chunks, critic.mesh, critic.config.model, folder / "scores")
    source = RewardModelSource(part="step_model:rm", path=path, model=critic.config.model, own_text=None)

    def every_second(group: Group, completion: Completion) -> Reading:
        tokens_T = whole_reader(group, completion).tokens_T
        positions = range(len(tokens_T) - 1, len(group.prompt.tokens_T) - 1, -2)[::-1]
        return Reading(tokens_T, tuple(positions), tuple(range(1, len(positions) + 1)))

    frozen = FrozenModel(
        source.model, path, critic.mesh, critic.platform, config.platform, store="host", verify_checksums=True
    )
    model = RewardModel(
        source,
        every_second,
        frozen,
        critic.mesh,
        critic.platform.device,
        packed_length=max(config.packed_length, config.longest_sample + 1),
        packed_multiple=config.packed_multiple,
    )
    outcomes = iter(model.outcomes(list(rollout.groups.values())))
    found = {}
    for index, group in rollout.groups.items():
        scores = [next(outcomes) for _ in group.completions]
        assert all(isinstance(one, Score) and one.steps for one in scores), scores
        found[index] = [step.value for one in scores for step in one.steps]  # type: ignore[union-attr]
    return found


def numbers(report: StepReport) -> dict[str, float]:
    return replaced(report.sums) | {"loss": report.loss, "grad_norm": report.grad_norm}


def on_meshes(
    config: RlRunConfig, meshes: Sequence[MeshConfig], weights: Sequence[Tensors], folder: Path
) -> list[dict[str, Any]]:
    outcomes = []
    for index, mesh in enumerate(meshes):
        outcome = ppo_updates(config.model_copy(update={"mesh": mesh}), weights, folder / str(index))
        outcomes.append({name: outcome[name] for name in ("values", "critic", "policy", "scores")})
        destroy_mesh()
    return outcomes


def stored_and_not(
    config: RlRunConfig, meshes: Sequence[MeshConfig], weights: Sequence[Tensors], folder: Path
) -> list[bool]:
    """On a rank, of each mesh: whether the updates are the same bits when all that can wait leaves their tensors."""
    rl = config.rl
    waiting = with_critic(rl, store="host").model_copy(
        update={
            "update": rl.update.model_copy(update={"store": "host"}),
            "loss": rl.loss.model_copy(update={"reference_store": "device"}),
        }
    )
    found = []
    for index, mesh in enumerate(meshes):
        outcomes = []
        for name, section in (("host", waiting), ("device", rl)):
            one = config.model_copy(update={"mesh": mesh, "rl": section, "run_dir": str(folder / f"{name}{index}")})
            with leaving():
                outcomes.append(ppo_updates(one, weights, folder / f"{name}{index}"))
            destroy_mesh()
        found.append(are_equal(*outcomes))
    return found


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def critic_routed_otherwise(config: RlRunConfig, weights: Sequence[Tensors], folder: Path, how: str) -> tuple[str, str]:
    """On a rank: the errors of updates whose critic routes freely, or is only observed, and of its pass for
    values under routes that an update imposes.
    """
    found = []
    for name, routed in (("_imposing", how), ("_recording", "impose")):
        with mock.patch.object(Critic, name, ROUTED[routed]):
            try:
                ppo_updates(config, weights, folder / f"{name}-{how}")
                found.append("")
            except RoutingError as error:
                found.append(str(error))
        destroy_mesh()
    return found[0], found[1]


ROUTED: dict[str, Any] = {
    "free": lambda self, microbatches: nullcontext(free_routing),
    "observe": lambda self, microbatches: self._routes._taped(
        microbatches, RoutingTape.observe, self._routes._recorded, "routes"
    ),
    "impose": lambda self, microbatches: self._routes.update(microbatches, is_old_policy=False),
}
"""Routings of the critic's passes."""


GAMMA, LAMBDA, CRITIC_LAMBDA, BETA, CLIP, VALUE_CLIP = 0.97, 0.9, 1.0, 0.1, 0.05, 0.01
TEMPERATURE, EPS = 0.7, 1e-6
ADAM = OptimConfig(
    # With an epsilon of 1 a step is proportional to small gradients: Adam's division does not enlarge their rounding.
    lr=0.5,
    schedule="constant",
    eps=1.0,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.0,
    clip_grad=None,
)
ROUNDED, ROUNDINGS = 2, 32
"""A loss in fp32 may differ from that in float64 by what one rounding of every weight changes, over two draws, times
the root of the number of roundings in a row in a pass and its gradients: of a hundred and more, with a margin of three.
"""
COMPARED = {name: MESHES[name] for name in ("tp2", "pp2", "ep2", "pp2-vpp2", "cp2", "dp2", "tp2-ep2")}
TEACHERS = {"other": "a checkpoint", "itself": "self"}


def config_of(model: ModelConfig, replay: ReplayKind = "none", optim: OptimConfig = ADAM) -> RlRunConfig:
    """Two minibatches; clips that are reached, truncated completions that go on in the last value."""
    advantage = advantage_config(
        kind="gae",
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        bootstrap_truncated=True,
        eps=EPS,
        critic=CriticConfig(optim=optim, clip_value=VALUE_CLIP, gae_lambda=CRITIC_LAMBDA),
    )
    loss = loss_config(kind="ppo", clip_low=CLIP, clip_high=CLIP, kl_coeff=BETA, kl_in="reward")
    update = UpdateConfig(max_tokens_per_microbatch=80)
    return run_config(model, MeshConfig(), replay, optim, advantage=advantage, loss=loss, update=update)


class Theirs:
    """Policy, reference and critic of transformers in float64, and one rollout's updates as the papers write them."""

    def __init__(self, theirs: Oracle) -> None:
        self.policy, self.reference = (copy.deepcopy(theirs.model).double() for _ in range(2))
        self.critic = copy.deepcopy(theirs.model.model).double()  # type: ignore[operator]
        for model in (self.policy, self.reference, self.critic):
            model.config._experts_implementation = "eager"  # the grouped products have no float64
        self.score = nn.Linear(theirs.config["hidden_size"], 1, bias=False).double()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            self.score.weight.copy_(0.3 * torch.randn(self.score.weight.shape, generator=generator))
            # Not far from the policy, and not equal to it.
            for model in (self.reference, self.critic):
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.mul_(1 + 0.03 * noise)

    def weights(self, model: ModelConfig) -> list[Tensors]:
        """Policy, reference and critic in our names and layouts, float32."""
        policies = [
            to_global({n: t.float() for n, t in one.state_dict().items()}, model)
            for one in (self.policy, self.reference)
        ]
        values = {f"model.{n}": t.float() for n, t in self.critic.state_dict().items()}
        values["score.weight"] = self.score.weight.detach().float()
        return [*policies, to_global(values, model.scored) | {"score.shift": torch.zeros(1)}]

    def logprobs(self, model: Any, tokens: list[int], places: list[int]) -> Tensor:
        logits = model(torch.tensor([tokens[:-1]])).logits[0] / TEMPERATURE
        return logits.log_softmax(-1)[places, [tokens[place + 1] for place in places]]

    def values(self, tokens: list[int], places: list[int]) -> Tensor:
        """Value before each token that is predicted at one of these positions: of the hidden state there."""
        hidden = self.critic(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        return self.score(hidden)[places, 0]

    def update(self, config: RlRunConfig) -> dict[str, list[float]]:
        """Two minibatches of the rollout; returns the losses of policy and critic."""
        rollout = truncated_rollout(config, 0, 1)
        samples = {
            p * SIZE + g: (
                [*group.prompt.tokens_T, *completion.tokens_T],
                sampled_positions(rollout.shapes[p * SIZE + g]),
            )
            for p, group in rollout.groups.items()
            for g, completion in enumerate(group.completions)
            if rollout.shapes[p * SIZE + g].is_trained
        }
        advantages, returns, old, old_values = {}, {}, {}, {}
        for index, (tokens, places) in samples.items():
            with torch.no_grad():
                old[index] = self.logprobs(self.policy, tokens, places)
                reference = self.logprobs(self.reference, tokens, places)
                old_values[index] = self.values(tokens, places)
            d = reference - old[index]
            rewards = (-BETA * (d.exp() - 1 - d)).tolist()  # k3
            rewards[-1] += rollout.rewards_PG.flatten()[index].item()
            value = old_values[index].tolist()
            length = len(value)
            value.append(value[-1] if index in TRUNCATED else 0.0)
            differences = [rewards[t] + GAMMA * value[t + 1] - value[t] for t in range(length)]
            advantages[index], returns[index] = (
                [sum((GAMMA * lam) ** (k - t) * differences[k] for k in range(t, length)) for t in range(length)]
                for lam in (LAMBDA, CRITIC_LAMBDA)
            )
            returns[index] = [a + v for a, v in zip(returns[index], value, strict=False)]
        every = torch.tensor([a for one in advantages.values() for a in one], dtype=torch.float64)
        mean, deviation = every.mean(), every.std() + EPS
        adam = {"lr": ADAM.lr, "betas": (ADAM.beta1, ADAM.beta2), "eps": ADAM.eps, "weight_decay": 0.0}
        critic_parameters = [*self.critic.parameters(), *self.score.parameters()]
        optimizers = [
            torch.optim.AdamW(parameters, **adam) for parameters in (self.policy.parameters(), critic_parameters)
        ]
        losses: dict[str, list[float]] = {"policy": [], "critic": []}
        half = GROUPS * SIZE // 2
        for minibatch in (range(half), range(half, 2 * half)):
            policy_terms, critic_terms = [], []
            for index in minibatch:
                if index not in samples:
                    continue
                tokens, places = samples[index]
                ratio = (self.logprobs(self.policy, tokens, places) - old[index]).exp()
                advantage = (torch.tensor(advantages[index], dtype=torch.float64) - mean) / deviation
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                policy_terms.append(-torch.minimum(ratio * advantage, clipped * advantage))
                wanted = torch.tensor(returns[index], dtype=torch.float64)
                value, before = self.values(tokens, places), old_values[index]
                near = before + (value - before).clamp(-VALUE_CLIP, VALUE_CLIP)
                critic_terms.append(0.5 * torch.maximum((value - wanted) ** 2, (near - wanted) ** 2))
            for name, terms, optimizer in zip(losses, (policy_terms, critic_terms), optimizers, strict=True):
                optimizer.zero_grad()
                loss = torch.cat(terms).mean()
                loss.backward()
                optimizer.step()
                losses[name].append(loss.item())
        return losses


def test_two_updates_are_those_of_transformers_and_autograd_in_every_parameter(tmp_path: Path) -> None:
    theirs = Theirs(oracle("qwen3_moe"))
    config = config_of(oracle("qwen3_moe").ours)
    before = theirs.weights(config.model)
    (ours,) = run_ranks(ppo_updates, 1, config, before, tmp_path)
    rounded = [copy.deepcopy(theirs) for _ in range(ROUNDED)]
    for seed, one in enumerate(rounded):
        for model in (one.policy, one.reference, one.critic, one.score):
            change_by_an_ulp(model, seed)
    losses = theirs.update(config)
    losses_when_rounded = [one.update(config) for one in rounded]
    for name in ("policy", "critic"):
        for step, (one, wanted) in enumerate(zip(ours[name], losses[name], strict=True)):
            changes = [other[name][step] - wanted for other in losses_when_rounded]
            assert abs(one["loss"] - wanted) <= ROUNDINGS * math.hypot(*changes) / math.sqrt(ROUNDED)
    # Both clips are reached, which a mistake in them would otherwise pass.
    assert ours["policy"][1]["clipped_low"] + ours["policy"][1]["clipped_high"] > 0.02
    assert ours["critic"][1]["clipped"] > 0.02
    policy, _, critic = theirs.weights(config.model)
    for name, old, wanted in (("policy", before[0], policy), ("critic", before[2], critic)):
        got = assembled([ours["weights"][name]])
        assert got.keys() == wanted.keys()
        for key, tensor in wanted.items():
            moved = (tensor - old[key]).abs().max()
            assert (got[key] - tensor).abs().max() <= 1e-5, (name, key)
            assert moved > 1e-4 or key == "score.shift", (name, key, moved)


@functools.cache
def weights_of(model: ModelConfig) -> list[Tensors]:
    """Policy, reference and critic; each near the policy and not equal to it."""
    (pieces,) = run_ranks(initial_weights, 1, config_of(model))
    policy, critic = (assembled([piece]) for piece in pieces)
    generator = torch.Generator().manual_seed(3)
    critic["score.weight"] = 0.3 * torch.randn(1, 64, generator=generator)

    def near(tensors: Tensors) -> Tensors:
        return {n: t * (1 + 0.1 * torch.randn(t.shape, generator=generator)) for n, t in tensors.items()}

    return [policy, near(policy), near(critic)]


MORE: dict[ReplayKind, dict[str, Any]] = {
    "none": {},
    "r2": {
        "distill": DistillConfig(teachers=TEACHERS, use="loss", estimator="vocabulary", coeff=0.5),
        "ptx": PtxConfig(coeff=0.7, files=("conversations",), sequences=4),
    },
    "r3": {"distill": DistillConfig(teachers=TEACHERS, coeff=0.5)},
}
"""Further sections of rl with each kind of replay: all of them are on every mesh."""


FIRST: dict[ReplayKind, tuple[str, ...]] = {
    "none": ("tp2", "dp2"),
    "r2": ("pp2-vpp2", "cp2", "dp2"),
    "r3": ("tp2-ep2", "cp2"),
}
"""The meshes that are always compared; the others are of the matrix."""


@pytest.mark.full
@pytest.mark.parametrize("replay", MORE)
@pytest.mark.parametrize("which", ["first", "others"])
def test_ppo_does_not_depend_on_the_mesh(which: str, replay: ReplayKind, tmp_path: Path) -> None:
    """With R2 the critic's updates have the routes of its values, teachers and texts add to the loss; with R3 the
    routes are the engine's and teachers add to the advantages.
    """
    meshes = {name: mesh for name, mesh in COMPARED.items() if (name in FIRST[replay]) == (which == "first")}
    model = shallow(TINY["qwen3_moe"], *meshes.values())
    weights = weights_of(model)
    optim = OptimConfig(lr=1e-3, schedule="constant", clip_grad=0.3)
    config = config_of(model, replay, optim)
    if MORE[replay]:
        # Rows of the embedding that texts alone have, and experts of random routes, have small gradients: a small
        # epsilon would enlarge their rounding.
        optim = optim.model_copy(update={"eps": 1e-3})
    rl = with_critic(config.rl, optim=optim, replay="r2" if replay == "r2" else "none")
    rl = rl.model_copy(update=MORE[replay])
    policy_optim = optim.model_copy(update={"lr": 1e-2}) if MORE[replay] else optim
    config = config.model_copy(update={"rl": rl, "optim": policy_optim})
    (reference,) = run_ranks(ppo_updates, 1, config, weights, tmp_path / "one")
    ranks = run_ranks(on_meshes, 2, config, list(meshes.values()), weights, tmp_path)
    for index in range(len(meshes)):
        assert set().union(*(rank[index]["scores"] for rank in ranks)) == set(range(GROUPS))
    for rank in ranks:
        for mesh, outcome in zip(meshes, rank, strict=True):
            for index, scores in outcome["scores"].items():
                assert scores == pytest.approx(reference["scores"][index], rel=1e-5, abs=1e-5), mesh
            assert outcome["values"] == pytest.approx(reference["values"], rel=1e-6, abs=1e-6), mesh
            for name in ("critic", "policy"):
                for step, (one, other) in enumerate(zip(outcome[name], reference[name], strict=True)):
                    # Means of terms of up to one, of at least 64 tokens.
                    rounding = fp32_rounding(1.0, 64)
                    assert one == pytest.approx(other, rel=1e-6, abs=rounding), (mesh, name, step)
    assert ("kl_teacher" in reference["policy"][0]) == (replay != "none")
    assert ("ptx_loss" in reference["policy"][0]) == (replay == "r2")


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_models_that_wait_in_main_memory_between_their_phases_are_bit_equal(num_ranks: int, tmp_path: Path) -> None:
    """On two ranks weights are gathered in the next forward pass, which the critic's must not wait for."""
    mesh = MeshConfig(dp=2, overlap_grad_reduce=True, overlap_param_gather=True)
    meshes = [MeshConfig() if num_ranks == 1 else mesh]
    model = shallow(TINY["qwen3_moe"])
    work = (config_of(model), meshes, weights_of(model), tmp_path)
    assert run_ranks(stored_and_not, num_ranks, *work) == [[True]] * num_ranks


@pytest.mark.matrix("dp2-reinforce_plus_plus_baseline")
@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("mesh", ["1", "dp2"])
def test_reinforce_plus_plus_normalises_discounted_rewards_over_the_world(
    mesh: str, kind: Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline"]
) -> None:
    config = config_of(TINY["qwen3_moe"])
    advantage = advantage_config(kind=kind, gamma=GAMMA, eps=EPS)
    loss = config.rl.loss.model_copy(update={"kl_coeff": 0.0})
    rl = config.rl.model_copy(update={"advantage": advantage, "loss": loss})
    config = config.model_copy(update={"rl": rl, "mesh": MESHES[mesh]})
    rollout = rollout_of(config, 0, 1)
    rewards = [
        reward - statistics.mean(scored) if kind == "reinforce_plus_plus_baseline" and scored else reward
        for row in rollout.rewards_PG.tolist()
        for scored in [[one for one in row if not math.isnan(one)]]
        for reward in row
    ]
    later = {
        (index, places[-1 - t]): rewards[index] * GAMMA**t
        for index, shape in rollout.shapes.items()
        if shape.is_trained and (places := sampled_positions(shape))
        for t in range(len(places))
    }
    mean, deviation = statistics.mean(later.values()), statistics.stdev(later.values()) + EPS
    ranks = run_ranks(token_advantages, config.mesh.smallest_world, config)
    got = {(sample, t): advantage for rank in ranks for sample, t, advantage in rank}
    assert got == pytest.approx({key: (x - mean) / deviation for key, x in later.items()}, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("how", ["free", "observe"])
def test_a_critic_whose_routes_are_not_replayed_is_an_error(how: str, tmp_path: Path) -> None:
    """It ended with status 0, and a critic that had learned under other experts than its values'."""
    model = shallow(TINY["qwen3_moe"])
    config = config_of(model, "r2")
    config = config.model_copy(update={"rl": with_critic(config.rl, replay="r2")})
    ((update, values),) = run_ranks(critic_routed_otherwise, 1, config, weights_of(model), tmp_path, how)
    assert "a pass under replayed routes was routed live" in update
    assert values
