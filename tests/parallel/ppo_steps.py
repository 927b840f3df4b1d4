"""Updates of a policy and its critic on a given rollout: apart from its tests, so that ranks need not import them."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.schedule import free_routing
from mcore_rl.model.build import settle_weights
from mcore_rl.model.global_tensors import copy_in
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.rl.models.critic import Critic, critic_routes
from mcore_rl.rl.models.frozen_model import FrozenModel
from mcore_rl.rl.models.reference import Reference
from mcore_rl.rl.models.teachers import Teachers
from mcore_rl.rl.passes.policy_routes import PolicyRoutes
from mcore_rl.rl.rewards.from_model import Reading, RewardModel, RewardModelSource, whole_reader
from mcore_rl.rl.rewards.worker import Score
from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.types import Completion, Group
from mcore_rl.rl.update.learner import Learner, policy_logprobs
from mcore_rl.storage.checkpoints.weights import save_weights
from mcore_rl.train.offload import all_present
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport
from tests.parallel.parity import Tensors, owned
from tests.parallel.plain import set_up_plain
from tests.parallel.rl_steps import reference_pass, replaced, rollout_of, texts_pass
from tests.sections import with_critic
from tests.waiting import leaving

TRUNCATED = (0, 5, 10, 23)
"""Samples that reached the largest length."""


def truncated_rollout(config: RlRunConfig, dp_cp_rank: int, dp_cp_size: int) -> Rollout:
    """The ragged rollout of random tokens, some of whose completions have no end, and one no reward."""
    rollout = rollout_of(config, dp_cp_rank, dp_cp_size)
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
    passes = [reference_pass(config, reference, logprobs, routes, state), critic]
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
        passes.append(
            Teachers(
                teachers,
                config.rl.distill,
                logprobs.head,
                state,
                updates_per_rollout=config.updates_per_rollout,
            )
        )
    if config.rl.ptx.coeff:
        passes.append(texts_pass(config, state))
    learner = Learner(state, config, routes, logprobs, passes)
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
    """All weights of a model on this rank."""
    return [parameter for chunk in state.chunks for parameter in chunk.parameters()]


def scores_of(
    rollout: Rollout, critic: TrainState, config: RlRunConfig, folder: Path
) -> dict[int, list[float]]:
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
        source.model,
        path,
        critic.mesh,
        critic.platform,
        config.platform,
        store="host",
        verify_checksums=True,
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
    """Loss, gradient norm and statistics of an update."""
    return replaced(report.sums) | {"loss": report.loss, "grad_norm": report.grad_norm}


def on_meshes(
    config: RlRunConfig, meshes: Sequence[MeshConfig], weights: Sequence[Tensors], folder: Path
) -> list[dict[str, Any]]:
    """On a rank: the updates on each mesh, one after another."""
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
            one = config.model_copy(
                update={"mesh": mesh, "rl": section, "run_dir": str(folder / f"{name}{index}")}
            )
            with leaving():
                outcomes.append(ppo_updates(one, weights, folder / f"{name}{index}"))
            destroy_mesh()
        found.append(are_equal(*outcomes))
    return found


def are_equal(one: Any, other: Any) -> bool:
    """Whether nested results have the same bits."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def critic_routed_otherwise(
    config: RlRunConfig, weights: Sequence[Tensors], folder: Path, how: str
) -> tuple[str, str]:
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
