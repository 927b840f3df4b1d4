"""The critic: a second model, trained on the returns of rollouts. Its values are the baseline of PPO's advantages."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mcore_rl.checks.inputs import has_checkpoints
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.loss import CriticConfig, GrpoLoss
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import CheckpointConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.schedule import HeadOutput, Routing, free_routing, run_pass, signal_of
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.adapters import adapters_in
from mcore_rl.model.build import settle_weights, unwrap
from mcore_rl.planning.flops import train_flops_by_length
from mcore_rl.replay.witness import proving
from mcore_rl.rl.batch import Advantages, Minibatch, PolicyMicrobatch, ValueHead, evaluating
from mcore_rl.rl.step.advantages import clipped_value_loss
from mcore_rl.rl.step.policy_routes import PolicyRoutes
from mcore_rl.rl.types import Rollout
from mcore_rl.storage.checkpoint import check, find_checkpoint
from mcore_rl.storage.checkpoints.write import load_weights
from mcore_rl.storage.folders import stored_lora
from mcore_rl.train.loop import Run
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport, compute_gradients, optimizer_step, refuse_no_gradient

OF_LAYERS = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
"""Model fields that must be the same in a critic's checkpoint and the policy; loading checks the rest."""


class ValueLossHead:
    """Computes the clipped squared error of the critic's values, averaged over all trained tokens."""

    wants_losses = False

    def __init__(self, clip: float | None) -> None:
        """Take rl.advantage.critic.clip_value; None: values are not clipped."""
        self._clip = clip

    def count(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return the number of trained tokens, as for the policy's loss."""
        return microbatch.mask_T.sum().to(torch.int)

    def __call__(self, microbatch: PolicyMicrobatch, output: Tensor) -> HeadOutput:
        """Return the loss of one microbatch from scores `[1, T, 1]`, with the loss and clipped tokens as outputs."""
        assert microbatch.values_T is not None and microbatch.returns_T is not None
        values_T = output[0, :, 0].float()
        loss_T, is_clipped_T = clipped_value_loss(values_T, microbatch.values_T, microbatch.returns_T, self._clip)
        loss = loss_T.where(microbatch.mask_T, 0.0).sum()
        count = self.count(microbatch)
        clipped = (is_clipped_T & microbatch.mask_T).sum()
        outputs = {"loss": loss.detach(), "count": count, "clipped": clipped} | signal_of(values_T)
        return HeadOutput(loss=loss, count=count, outputs=outputs)


class Critic:
    """Value model with its own optimizer and its own routes. Every method is collective over the world."""

    needs_old_logprobs = False

    def __init__(
        self,
        state: TrainState,
        policy: TrainState,
        critic: CriticConfig,
        checkpoint: CheckpointConfig,
        routes: PolicyRoutes | None = None,
        *,
        epochs: int,
        updates_per_rollout: int,
    ) -> None:
        """Prepare this rank. `state` has a scalar head; the timers of `policy` also time the critic. `routes`, from
        `critic_routes`, are for `rl.advantage.critic.replay` (None: live routes). `updates_per_rollout` counts the
        policy's steps.
        """
        self.state, self._policy, self._routes = state, policy, routes
        self._critic, self._checkpoint = critic, checkpoint
        self._epochs, self._updates_per_rollout = epochs, updates_per_rollout
        self._reports: list[StepReport] = []
        self._head, self._loss_head = ValueHead(), ValueLossHead(critic.clip_value)

    def begin(self, policy: Sequence[nn.Module]) -> str:
        """Load the critic's initial weights, or without `rl.advantage.critic.load` copy the layers of `policy` and
        start with a new head; return a line for the log.
        """
        state, checkpoint = self.state, self._checkpoint
        with state.residence.for_saving():
            if self._critic.load is None:
                _copy_layers(policy, state.chunks)
                without = ", without its adapters" if any(adapters_in(policy)) else ""
                line = f"critic: layers of the policy{without}, and a new head: all values start at 0"
            else:
                stored = load_weights(
                    state.chunks,
                    state.mesh,
                    state.config.model,
                    Path(self._critic.load),
                    verify_checksums=checkpoint.verify_checksums,
                    allowed=checkpoint.allow_changes,
                )
                head = "" if stored.has_scores else ", and a new head: all values start at 0"
                line = f"critic: weights of {stored.path}{head}"
            # The optimizer has its own copy of the weights.
            state.optimizer.reload_model_params()
        return line

    def holds_policy(self) -> str | None:
        """Reason why the policy is not trained yet, in the first rollout batches; None if it is trained."""
        rollouts = self._policy.progress.step // self._updates_per_rollout
        return "the critic warms up" if rollouts < self._critic.warmup_rollouts else None

    def add(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with values under the critic's current weights, and record the routes of this pass."""
        with self._policy.timers.phase("values"):
            return self._with_values(rollout, minibatches)

    @torch.no_grad()
    def _with_values(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        chunks, valued = self.state.chunks, []
        if self._routes is not None:
            self._routes.begin(
                rollout, [microbatch for minibatch in minibatches for microbatch in minibatch.microbatches]
            )
        with self.state.residence.for_passes():
            for minibatch in minibatches:
                if minibatch.num_samples:
                    with (
                        evaluating(chunks),
                        self._recording(minibatch.microbatches) as routing,
                        self._proving(is_imposed=False),
                    ):
                        outputs = run_pass(chunks, minibatch.microbatches, self._head, backward=False, routing=routing)
                    minibatch = minibatch.with_numbers("values_T", [output["values"] for output in outputs])
                valued.append(minibatch)
        return valued

    def before_updates(self, minibatches: Sequence[Minibatch], advantages: Advantages) -> list[Metric]:
        """Train the critic on the returns. The advantages use its values from before this training, so the policy's
        updates do not depend on it.
        """
        start_s = time.perf_counter()
        with self._policy.timers.phase("critic"):
            self._reports = self.update(minibatches, advantages.returns)
        updates_s = time.perf_counter() - start_s
        metrics = [Metric("critic/lr", report.learning_rate) for report in self._reports]
        for report in self._reports:
            if not report.skipped:
                metrics += [
                    Metric("critic/loss", report.sums["loss"], report.count),
                    Metric("critic/clip_ratio", report.sums["clipped"], report.count),
                    Metric("critic/grad_norm", report.grad_norm),
                ]
        # The fraction of expert choices that live routing would have changed in these updates.
        metrics += [
            replace(metric, name="critic/routes_changed_fraction")
            for metric in ([] if self._routes is None else self._routes.take_metrics())
            if metric.name == "routes/changed_fraction"
        ]
        if self._reports:
            flops_per_token = train_flops_by_length(self.state.config.model)
            flops = self._epochs * sum(
                minibatch.num_positions * flops_per_token(minibatch.mean_length) for minibatch in minibatches
            )
            size = self.state.mesh.world.size
            metrics.append(Metric("critic/model_tflops_per_rank", flops / 1e12, updates_s * size))
        return metrics

    def take_reports(self) -> list[StepReport]:
        """Return reports of the optimizer steps since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def update(self, minibatches: Sequence[Minibatch], returns: Mapping[int, Tensor]) -> list[StepReport]:
        """Take an optimizer step on each minibatch with trained tokens, in every epoch, with `returns` as targets."""
        reports = []
        with self.state.residence.for_updates():
            # A step without a gradient would still move the weights, by Adam's momentum.
            for minibatch in [each for each in minibatches if each.totals.num_tokens] * self._epochs:
                microbatches = [microbatch.with_returns(returns) for microbatch in minibatch.microbatches]
                # From the config, not from the routing: the proof must not depend on the routing it checks.
                is_imposed = self._critic.replay == "r2"
                with self._imposing(microbatches) as routing, self._proving(is_imposed=is_imposed):
                    gradients = compute_gradients(self.state, microbatches, self._loss_head, routing=routing)
                report = optimizer_step(self.state, gradients)
                refuse_no_gradient(report, self.state.progress.step)
                reports.append(report)
        return reports

    def _proving(self, *, is_imposed: bool) -> AbstractContextManager[None]:
        """Context that proves that the pass inside imposes routes, or imposes none; a dense model needs no proof."""
        if not self.state.config.model.is_moe:
            return nullcontext()
        return proving(self.state.chunks, is_imposed=is_imposed)

    def _recording(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        if self._routes is None:
            return nullcontext(free_routing)
        return self._routes.old_policy(microbatches)

    def _imposing(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        if self._routes is None:
            return nullcontext(free_routing)
        return self._routes.update(microbatches, is_old_policy=False)


def critic_routes(state: TrainState, rl: RlConfig, replay: ReplayConfig, critic: CriticConfig) -> PolicyRoutes | None:
    """Return the routes of the critic `state` for rl.advantage.critic.replay="r2", recorded by its pass for values;
    None if routes are not replayed.
    """
    if critic.replay == "none":
        return None
    update = rl.update.model_copy(update={"old_logprobs": "trainer"})
    return PolicyRoutes(
        state,
        # The router-shift ratio belongs to the policy's loss only.
        rl.model_copy(update={"update": update, "loss": GrpoLoss()}),
        replay.model_copy(update={"kind": "r2", "observe_rollout": False}),
    )


@torch.no_grad()
def _copy_layers(policy: Sequence[nn.Module], critic: Sequence[nn.Module]) -> None:
    """Copy all weights and expert biases except the head; both models are sharded the same way over the mesh."""
    settle_weights(policy)
    for source, target in zip(map(unwrap, policy), map(unwrap, critic), strict=True):
        theirs = dict(source.named_parameters()) | dict(source.named_buffers())
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            if not name.startswith("output_layer."):
                tensor.copy_(theirs[name])


def refuse_other_critic(load: str, model: ModelConfig, run_dir: Path) -> None:
    """Raise a ConfigError if the model in rl.advantage.critic.load has different layers from the policy's, or low-rank
    adapters.
    """
    if has_checkpoints(run_dir):
        return
    path = find_checkpoint(Path(load))
    stored = ModelConfig.model_validate_json(json.dumps(check(path).model))
    differing = [
        f"{name} {getattr(stored, name)} instead of {getattr(model, name)}"
        for name in OF_LAYERS
        if getattr(stored, name) != getattr(model, name)
    ]
    if differing:
        raise ConfigError(
            f"rl.advantage.critic.load={load} is of a model with {', '.join(differing)}: the critic has the "
            "policy's layers. Name a checkpoint of the policy's model, or leave it out to start from the policy."
        )
    if stored_lora(path).is_on:
        raise ConfigError(
            f"rl.advantage.critic.load={load} has low-rank adapters, and a critic is trained whole. Add them to its "
            "weights with `mcore-rl convert export --merge`, import the result, and name that."
        )


def load_critic(config: RlRunConfig, run: Run) -> Critic | None:
    """Collective over the world: return the run's critic, with weights from rl.advantage.critic.load or the policy at
    step 0, and from the checkpoint later; None without a critic.
    """
    state = run.state.critic
    if state is None or config.critic is None:
        return None
    critic = Critic(
        state,
        run.state,
        config.critic,
        config.checkpoint,
        critic_routes(state, config.rl, config.replay, config.critic),
        epochs=config.critic_epochs,
        updates_per_rollout=config.updates_per_rollout,
    )
    if run.state.progress.step == 0:
        run.log.message(critic.begin(run.state.chunks))
    return critic
