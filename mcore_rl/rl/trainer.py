"""Reinforcement learning: roll out, judge, learn, hand the new weights to the engine."""

import time
from collections.abc import Iterator, Sequence

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.model.router_load import RouterLoad
from mcore_rl.obs.memory import memory_metrics
from mcore_rl.obs.metrics import Metric
from mcore_rl.obs.peak import peak_flops
from mcore_rl.obs.speed import speed_metrics
from mcore_rl.parallel.schedule import MAX
from mcore_rl.plan.flops import train_flops_per_token
from mcore_rl.rl.evaluation import evaluate_policy, evaluation_metrics
from mcore_rl.rl.learner import Learner, Minibatch
from mcore_rl.rl.objectives.diagnostics import loss_metrics
from mcore_rl.rl.rollout import Rollout, Rollouts
from mcore_rl.rl.samples import gather_samples, shown, write_samples
from mcore_rl.rl.types import Prompt
from mcore_rl.train.auxiliary import take_auxiliary_losses
from mcore_rl.train.loop import Run, Trainer
from mcore_rl.train.step import StepReport


class RlTrainer(Trainer):
    """A unit of work is a rollout batch: it is made, learned from, and forgotten. A run that resumes makes the next
    one from the same prompts with the same seeds and weights.
    """

    def __init__(
        self,
        run: Run,
        config: RlRunConfig,
        rollouts: Rollouts,
        learner: Learner,
        held_out: Sequence[Prompt],
    ) -> None:
        super().__init__(run)
        self.config = config
        self.rollouts = rollouts
        self.learner = learner
        self.held_out = held_out
        self._load = RouterLoad(run.state.chunks) if config.model.is_moe else None
        self._peak_flops = peak_flops(
            run.state.platform.device, config.platform.precision, config.log.peak_tflops
        )

    def run(self) -> None:
        """Train as `Trainer.run` does; the policy is evaluated before its first update too."""
        if self.state.progress.step == 0 and self.config.train.eval_interval:
            self._evaluate(is_last=False)
        super().run()

    def _step(self) -> None:
        """One rollout batch: as many optimizer steps as it has minibatches, times the epochs."""
        progress, started_s = self.state.progress, time.perf_counter()
        rollout = self.rollouts.take(progress.consumed_prompts)
        progress.consumed_prompts += rollout.num_prompts
        minibatches = self.learner.with_logprobs(self.learner.minibatches(rollout))
        advantages = self.learner.advantages(rollout, minibatches)
        self._tell_samples(rollout)
        last = self.config.rl.update.epochs * len(minibatches)
        for number in range(1, last + 1):
            minibatch = minibatches[(number - 1) % len(minibatches)]
            since_s = time.perf_counter()
            report = self.learner.update(minibatch, advantages)
            took_s = time.perf_counter() - since_s
            metrics = list(self._update_metrics(minibatch, report, took_s)) if report else []
            metrics += self.learner.routes.take_metrics()
            if number == last:
                self.rollouts.engine.update_weights(progress.step)
                self.learner.refresh_reference()
                metrics += [*rollout.metrics, *self._rollout_metrics(time.perf_counter() - started_s)]
            self.log.write(progress.step, metrics)
            if report is None:
                self.log.message(
                    "nothing to train on in this update: weights are as before", step=progress.step
                )
            else:
                self._check_skipped(report)

    def _evaluate(self, *, is_last: bool) -> None:
        if not self.held_out:
            return
        with self.state.timers.phase("eval"):
            _, facts = evaluate_policy(self.rollouts, self.held_out, self.config.rl.eval)
        self.log.write_now(self.state.progress.step, evaluation_metrics(facts))

    def _tell_samples(self, rollout: Rollout) -> None:
        """Written and shown every so many rollout batches."""
        samples, step = self.config.rl.samples, self.state.progress.step
        if not samples.interval or step // self.config.updates_per_rollout % samples.interval:
            return
        of_all = gather_samples(rollout, self.state.mesh)
        if self.state.platform.rank == 0 and of_all:
            write_samples(self.folder.path / "samples", step, of_all)
            for line in shown(of_all, samples.shown):
                self.log.message(line)

    def _update_metrics(self, minibatch: Minibatch, report: StepReport, took_s: float) -> Iterator[Metric]:
        """Of one optimizer step."""
        state = self.state
        yield Metric("train/lr", report.learning_rate)
        yield Metric("train/skipped_steps", state.progress.skipped_steps)
        yield Metric("train/consumed_samples", state.progress.consumed_samples)
        yield Metric("train/consumed_tokens", state.progress.consumed_tokens)
        flops = train_flops_per_token(self.config.model, minibatch.mean_length)
        yield from speed_metrics(
            minibatch.num_positions, took_s, state.mesh.world.size, flops, self._peak_flops
        )
        if report.skipped:
            return
        yield Metric("train/grad_norm", report.grad_norm)
        maxima = {name.removeprefix(MAX): x for name, x in report.sums.items() if name.startswith(MAX)}
        yield from loss_metrics(report.sums, maxima)

    def _rollout_metrics(self, took_s: float) -> list[Metric]:
        """Collective over the world: what is measured once a rollout batch."""
        state, updates = self.state, self.config.updates_per_rollout
        metrics = [
            Metric("rl/step_s", took_s),
            Metric("rl/rollouts", state.progress.step // updates),
            Metric("rl/consumed_prompts", state.progress.consumed_prompts),
            *state.timers.take(),
            *memory_metrics(state.platform.device),
            *self._auxiliary_losses(),
        ]
        if self._load is not None:
            metrics += self._load.gather(state.mesh).metrics()
        return metrics

    def _auxiliary_losses(self) -> list[Metric]:
        num_microbatches = self.learner.take_num_microbatches()
        return take_auxiliary_losses(self.state, num_microbatches) if num_microbatches else []
