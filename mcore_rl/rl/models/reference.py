"""The reference policy: other weights for the policy's modules, their logprobs, and the KL to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.loss import AnyLoss, LossConfig
from mcore_rl.config.section import Store
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.build import settle_weights, unwrap
from mcore_rl.rl.batch import Minibatch, PolicyMicrobatch
from mcore_rl.rl.step.losses import Objective, kl_estimate
from mcore_rl.rl.step.policy_routes import PolicyLogprobs, PolicyRoutes
from mcore_rl.rl.types import Rollout, WaitingBytes
from mcore_rl.storage.checkpoint import delete, saved_steps
from mcore_rl.storage.checkpoints.write import load_weights, save_weights
from mcore_rl.storage.files import checkpoint_errors_explained
from mcore_rl.train.loop import Run
from mcore_rl.train.offload import StoredBytes
from mcore_rl.train.state import TrainState


class Reference:
    """Earlier weights of the policy, swapped into its modules for a pass, as a second model would double the memory. Of
    a frozen base with low-rank adapters, only these are copied. Every method is collective over the mesh.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        model: ModelConfig,
        folder: Path,
        checkpoints: Path,
        *,
        needed_by: str = "rl.loss.kl_coeff",
        store: Store = "host",
        allowed: tuple[str, ...] = (),
        shares_base: bool = False,
        base: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Copy the policy's current weights, except frozen weights that `shares_base` says are shared, to `store`
        ("host" is page-locked with CUDA). A resumed run reads saved references from `folder`; those that a checkpoint
        in `checkpoints` needs are kept.

        `needed_by` is the setting that error messages name. `allowed` is `checkpoint.allow_changes`. `base` is the
        checkpoints' entry of this name (storage/checkpoint.py), whose weights saved references leave out too.
        """
        self.chunks, self._needed_by, self._allowed = list(chunks), needed_by, allowed
        self._mesh, self._model, self._folder, self._checkpoints = mesh, model, folder, checkpoints
        settle_weights(self.chunks)
        self._store, self._shares_base, self._base = store, shares_base, base
        self._weights = [StoredBytes(tensor.nbytes, store, tensor.device) for tensor in self._tensors()]
        self._keep()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the modules have the reference's weights. They must not be trained inside."""
        settle_weights(self.chunks)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def set(self, step: int) -> None:
        """Make the current policy the reference from `step` on, and save it for resumed runs."""
        settle_weights(self.chunks)
        self._keep()
        # A run that is killed after this and resumes from an earlier step gets here again.
        on_rank_zero(lambda: delete([self._folder / _name(later) for later in _steps(self._folder) if later >= step]))
        save_weights(self.chunks, self._mesh, self._model, self._folder / _name(step), self._base)
        on_rank_zero(partial(forget_references, self._folder, self._checkpoints, step))

    def resume(self, step: int) -> Path:
        """Load the reference of a run at `step` and return its path; raises CheckpointError if it is gone."""

        def newest() -> Path:
            steps = [saved for saved in _steps(self._folder) if saved <= step]
            if not steps:
                raise CheckpointError(
                    f"{self._folder} holds no reference policy of step {step} or before, which {self._needed_by} "
                    "needs. Start the run anew in another run_dir, from the weights that were the reference "
                    "(checkpoint.load)"
                )
            return self._folder / _name(steps[-1])

        path = on_rank_zero(newest)
        with self.installed():
            load_weights(self.chunks, self._mesh, self._model, path, allowed=self._allowed)
        return path

    @property
    def waiting_bytes(self) -> WaitingBytes:
        """Bytes of the reference's weights on this rank."""
        return WaitingBytes(**{self._store: sum(stored.num_bytes for stored in self._weights)})

    @torch.no_grad()
    def _keep(self) -> None:
        for stored, tensor in zip(self._weights, self._tensors(), strict=True):
            stored.put(tensor)

    @torch.no_grad()
    def _swap(self) -> None:
        # One tensor at a time, so that no second set of weights is on the device.
        for stored, tensor in zip(self._weights, self._tensors(), strict=True):
            other = tensor.detach().clone()  # `get` overwrites the tensor
            stored.get(tensor)
            stored.put(other)

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the weights, and the buffers that affect the output: the routers' expert biases."""
        for chunk in self.chunks:
            model = unwrap(chunk)
            if self._shares_base:
                yield from (param for param in model.parameters() if param.requires_grad)
                continue
            yield from model.parameters()
            yield from (buffer for buffer in model.buffers() if buffer.is_floating_point())


LARGEST_ERROR = 0.2
"""Largest relative error of the KL that the controller responds to."""
KL_COEFFS = torch.finfo(torch.float32)
"""Range of a KL coefficient, which weighs float32 terms: from the smallest normal number to the largest."""


def next_kl_coeff(coeff: float, kl_nats: float, *, target: float, horizon: int, num_completions: int) -> float:
    """Return the coefficient of the next rollout batch: larger where the KL is above its target, smaller below it. KLs
    are in nats, summed over a completion's tokens, mean over completions.

    The authors of arXiv 1909.08593 limit the error to 0.2 and multiply by 1 + error x completions / horizon, which is
    negative beyond five horizons. Here that is added to the logarithm, the same for small steps, and a batch of more
    than one horizon counts as one: a factor is at most e^0.2. The coefficient stays a number of float32.
    """
    error = min(max(kl_nats / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return min(max(coeff * exp(error * min(1.0, num_completions / horizon)), KL_COEFFS.tiny), KL_COEFFS.max)


class ReferencePass:
    """Adds logprobs under the reference policy, and adapts the KL coefficient if rl.loss.kl_target is set."""

    def __init__(
        self,
        reference: Reference,
        loss: LossConfig,
        replay: ReplayConfig,
        logprobs: PolicyLogprobs,
        routes: PolicyRoutes,
        state: TrainState,
        *,
        updates_per_rollout: int,
    ) -> None:
        """Prepare this rank. The progress of `state` has the KL coefficient."""
        self._reference, self._loss, self._logprobs, self._routes = reference, loss, logprobs, routes
        self._state, self._updates_per_rollout = state, updates_per_rollout
        self._is_imposed = replay.reference == "replay"
        self.reward_kl = self if loss.has_kl_in_reward else None
        self.needs_old_logprobs = (
            loss.kl_in == "reward" or loss.kl_target is not None or (self._is_imposed and replay.kind == "r2")
        )

    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes of the reference's weights on this rank between passes, by where they are stored."""
        return [self._reference.waiting_bytes]

    @property
    def coeff(self) -> float:
        """KL coefficient for this rollout batch: the config's, unless `rl.loss.kl_target` has adapted it."""
        controlled = None if self._loss.kl_target is None else self._state.progress.kl_coeff
        return self._loss.kl_coeff if controlled is None else controlled

    def add(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return the minibatches with `reference_logprobs_T`."""
        with self._state.timers.phase("reference"), self._reference.installed():
            return [
                self._logprobs.added(
                    minibatch, "reference_logprobs_T", self._routes.reference, is_imposed=self._is_imposed
                )
                for minibatch in minibatches
            ]

    def in_objective(self, objective: Objective) -> Objective:
        """Return the terms of the loss with the KL coefficient for this rollout batch."""
        if objective.kl is None:
            return objective
        return replace(objective, kl=objective.kl._replace(coeff=self.coeff))

    def after_updates(self, minibatches: Sequence[Minibatch], *, policy_has_learned: bool) -> list[Metric]:
        """Adapt the KL coefficient to the rollout batch's KL, if `policy_has_learned` (no critic warms up), and make
        the policy the reference every `rl.loss.reference_refresh_rollouts` rollout batches.
        """
        loss = self._loss
        progress = self._state.progress
        metrics: list[Metric] = []
        if loss.kl_target is not None:
            num_completions = sum(minibatch.num_samples for minibatch in minibatches)
            kl_N = self.sums(len(minibatches[0].loss_weights_N), minibatches)
            kl_nats = kl_N.sum().item() / max(num_completions, 1)
            metrics += [Metric("kl/coeff", self.coeff), Metric("kl/completion", kl_nats)]
            if num_completions and policy_has_learned:
                progress.kl_coeff = next_kl_coeff(
                    self.coeff, kl_nats, target=loss.kl_target, horizon=loss.kl_horizon, num_completions=num_completions
                )
        refresh_when_due(self._reference, loss.reference_refresh_rollouts, progress.step, self._updates_per_rollout)
        return metrics

    def of_tokens(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return KL(old policy || reference) at each position `[T]` of a microbatch, on the last stage."""
        assert microbatch.old_logprobs_T is not None and microbatch.reference_logprobs_T is not None
        return kl_estimate(microbatch.old_logprobs_T, microbatch.reference_logprobs_T, self._loss.kl_estimator)

    def sums(self, num_samples: int, minibatches: Sequence[Minibatch]) -> Tensor:
        """Collective over the world: return the KL of the old policy to the reference, summed over each completion,
        whether or not it is trained on, float64 `[N]`.
        """
        mesh, device = self._state.mesh, self._state.platform.device
        sums_N = torch.zeros(num_samples, dtype=torch.float64, device=device)
        if mesh.is_last_stage:
            for microbatch in (each for minibatch in minibatches for each in minibatch.microbatches):
                if not microbatch.samples:
                    continue
                kl_T = self.of_tokens(microbatch).where(microbatch.completion_mask_T, 0.0)
                samples_N = torch.tensor(microbatch.samples, device=device)
                sums_N.index_add_(0, samples_N[microbatch.sequence_T], kl_T.double())
            dist.all_reduce(sums_N, group=mesh.dp_cp.group)
        # Only the last stage has logprobs, and every stage needs the same advantages.
        if mesh.pp.size > 1:
            dist.broadcast(sums_N, group=mesh.pp.group, group_src=mesh.pp.size - 1)
        return sums_N.cpu()


def refresh_when_due(reference: Reference, rollouts: int | None, step: int, updates_per_rollout: int) -> None:
    """Collective over the mesh: make the policy the reference every `rollouts` rollout batches (None: never)."""
    if rollouts is not None and step % (rollouts * updates_per_rollout) == 0:
        reference.set(step)


def _name(step: int) -> str:
    return f"step_{step:07d}"


def _steps(folder: Path) -> list[int]:
    with checkpoint_errors_explained(folder, "reading"):
        return sorted(int(entry.name[5:]) for entry in folder.glob("step_*") if entry.name[5:].isdecimal())


def forget_references(folder: Path, checkpoints: Path, step: int) -> None:
    """Delete references older than `step`, unless a run that resumes from a checkpoint needs them."""
    with checkpoint_errors_explained(checkpoints, "reading"):
        resumable = saved_steps(checkpoints)
    saved = _steps(folder)
    # A checkpoint needs the newest reference that is not later than the checkpoint.
    needed = {max((old for old in saved if old <= at), default=step) for at in resumable}
    delete([folder / _name(old) for old in saved if old < step and old not in needed])


def earlier_policy(run: Run, folder: str, role: str, store: Store, needed_by: str = "rl.loss.kl_coeff") -> Reference:
    """Collective over the world: return the policy of step 0 of a run, or the later one that took its place, which is
    saved in `folder` of the run's; `role` names it in the log, the others are as for Reference.
    """
    config, step = run.state.config, run.state.progress.step
    earlier = Reference(
        run.state.chunks,
        run.state.mesh,
        config.model,
        run.folder.path / folder,
        run.folder.checkpoints,
        needed_by=needed_by,
        store=store,
        allowed=config.checkpoint.allow_changes,
        shares_base=config.lora.is_on,
        base=run.checkpoints.base,
    )
    if step == 0:
        earlier.set(0)
    else:
        run.log.message(f"{role}: {earlier.resume(step)}")
    return earlier


def load_reference(
    loss: AnyLoss,
    replay: ReplayConfig,
    run: Run,
    logprobs: PolicyLogprobs,
    routes: PolicyRoutes,
    updates_per_rollout: int,
) -> ReferencePass | None:
    """Collective over the world: return the run's reference policy, at step 0 the policy; None without a KL to it."""
    if not loss.has_reference:
        return None
    reference = earlier_policy(run, "reference", "reference policy", loss.reference_store)
    return ReferencePass(reference, loss, replay, logprobs, routes, run.state, updates_per_rollout=updates_per_rollout)
