"""The critic: a second model, trained on the returns of rollouts, whose values are the baseline of PPO's advantages."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mcore_rl.checkpoint.weights import load_weights
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.model.build import unwrap
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.schedule import run_pass
from mcore_rl.rl.batch import Minibatch
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.objectives.heads import ValueHead, ValueLossHead
from mcore_rl.train.checkpoint_state import settle_weights
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport, train_step


class Critic:
    """Values by a model with its own optimizer and live routing. Every method is collective over the world."""

    def __init__(self, state: TrainState, config: RlRunConfig) -> None:
        """Take the model in training, which has a scalar head, and the run's config."""
        self.state = state
        self._config = config
        self._epochs = config.critic_epochs
        self._head = ValueHead()
        self._loss_head = ValueLossHead(config.rl.critic.clip_value)

    def begin(self, policy: Sequence[nn.Module]) -> str:
        """Give the critic the weights that it starts from and return a line for the log.

        Args:
            policy: the policy's chunks, which it starts from without `rl.critic.load`; its head is then new.
        """
        config, model = self._config, self.state.config.model
        if config.rl.critic.load is None:
            _copy_layers(policy, self.state.chunks)
            line = "critic: layers of the policy, and a new head: all values start at 0"
        else:
            path = Path(config.rl.critic.load)
            verify = config.checkpoint.verify_checksums
            stored = load_weights(self.state.chunks, self.state.mesh, model, path, verify_checksums=verify)
            head = "" if stored.has_scores else ", and a new head: all values start at 0"
            line = f"critic: weights of {stored.path}{head}"
        # The optimizer has its own copy of the weights.
        self.state.optimizer.reload_model_params()
        return line

    @torch.no_grad()
    def with_values(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with values under the weights that the critic has now."""
        chunks, valued = self.state.chunks, []
        for one in minibatches:
            if one.num_samples:
                with evaluating(chunks):
                    outputs = run_pass(chunks, one.microbatches, self._head, backward=False)
                one = one.with_numbers("values_T", [output["values"] for output in outputs])
            valued.append(one)
        return valued

    def update(self, minibatches: Sequence[Minibatch], returns: Mapping[int, Tensor]) -> list[StepReport]:
        """Take an optimizer step towards the returns on each minibatch with a trained token, `critic_epochs` times."""
        reports = []
        for minibatch in [one for one in minibatches if one.totals.num_tokens] * self._epochs:
            microbatches = [one.with_returns(returns) for one in minibatch.microbatches]
            reports.append(train_step(self.state, microbatches, self._loss_head))
        return reports


@torch.no_grad()
def _copy_layers(policy: Sequence[nn.Module], critic: Sequence[nn.Module]) -> None:
    """Copy weights and the routers' expert biases of all but the head; both models are cut alike over the mesh."""
    settle_weights(policy)
    for source, target in zip(map(unwrap, policy), map(unwrap, critic), strict=True):
        theirs = dict(source.named_parameters()) | dict(source.named_buffers())
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            if not name.startswith("output_layer."):
                tensor.copy_(theirs[name])


def critic_metrics(reports: Sequence[StepReport]) -> Iterator[Metric]:
    """Yield the metrics of the critic's optimizer steps."""
    for report in reports:
        yield Metric("critic/lr", report.learning_rate)
        if report.skipped:
            continue
        yield Metric("critic/loss", report.sums["loss"], report.count)
        yield Metric("critic/clip_ratio", report.sums["clipped"], report.count)
        yield Metric("critic/grad_norm", report.grad_norm)
