"""Rewards from a model with a scalar head: whole batches of completions, scored by passes on the ranks that train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, sqrt
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.backend.platform import Platform
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.plan import PackingLimits, plan_minibatches
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.schedule import run_pass
from mcore_rl.rl.batch import SampleShape, TrainedSample, exchange_samples, make_microbatch
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.frozen_model import FrozenModel, WaitingBytes
from mcore_rl.rl.objectives.heads import ValueHead
from mcore_rl.rl.types import Group

LENGTH_MULTIPLE = 64
"""Packed sequences are padded to a multiple of this, as those of the policy are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSource:
    """A reward model that the config names, before it is built."""

    part: str
    """Name of the part of the reward, `model:PATH`."""
    path: Path
    model: ModelConfig
    """Model of the checkpoint, which has a scalar head."""


class RewardModel:
    """A model that scores completions at their last token. Every method is collective over the world.

    It is cut over the policy's mesh, has no gradients and no optimizer, and routes freely.
    """

    def __init__(
        self, source: RewardModelSource, config: RlRunConfig, mesh: Mesh, platform: Platform
    ) -> None:
        """Build the model and load its weights.

        Args:
            source: the model and its checkpoint.
            config: the run's config, whose `rl.reward.model_store` says where weights wait between passes.
            mesh: the policy's mesh.
            platform: the platform of this rank.
        """
        self.part = source.part
        self._mesh, self._device = mesh, platform.device
        self._frozen = FrozenModel(
            source.model,
            source.path,
            config,
            mesh,
            platform,
            waits_on_host=config.rl.reward.model_store == "host",
        )
        self._head = ValueHead()
        longest = -(-(config.longest_sample + 1) // mesh.config.zigzag) * mesh.config.zigzag
        multiple = config.packed_multiple
        self._limits = PackingLimits(
            max_tokens=-(-max(config.packed_length, longest) // multiple) * multiple,
            multiple=lcm(multiple, LENGTH_MULTIPLE),
            sample_multiple=mesh.config.zigzag,
            microbatch_multiple=mesh.pp.size if mesh.config.vpp > 1 else 1,
            is_fixed=mesh.pp.size > 1,
        )
        self._dp_ranks = [0] * mesh.dp_cp.size
        dist.all_gather_object(self._dp_ranks, mesh.dp.rank, group=mesh.dp_cp.group)

    @property
    def waiting_bytes(self) -> WaitingBytes:
        """Bytes of its weights on this rank between passes."""
        return self._frozen.waiting_bytes

    @torch.no_grad()
    def scores(self, groups: Sequence[Group]) -> Tensor:
        """Return the scores of this replica's completions, float64 `[P, G]`, each of prompt and completion together."""
        mesh, device = self._mesh, self._device
        own = [
            (*group.prompt.tokens_T, *completion.tokens_T)
            for group in groups
            for completion in group.completions
        ]
        lengths_of_ranks: list[list[int]] = [[]] * mesh.dp_cp.size
        dist.all_gather_object(lengths_of_ranks, [len(tokens) for tokens in own], group=mesh.dp_cp.group)
        # A score is read at the last token, which must enter the layers: what follows it here is only a label.
        shapes = dict(
            enumerate(
                SampleShape(
                    replica_rank=rank, num_prompt_tokens=length, num_completion_tokens=1, is_trained=True
                )
                for rank, lengths in enumerate(lengths_of_ranks)
                for length in lengths
            )
        )
        if not shapes:
            return torch.zeros(len(groups), 0, dtype=torch.float64)
        first = sum(map(len, lengths_of_ranks[: mesh.dp_cp.rank]))
        samples = {
            first + index: TrainedSample(
                tokens_T=torch.tensor([*tokens, tokens[-1]]),
                num_prompt_tokens=len(tokens),
                rollout_logprobs_C=torch.zeros(1),
                is_trained=True,
            )
            for index, tokens in enumerate(own)
        }
        lengths_N = [shapes[index].num_positions for index in range(len(shapes))]
        (plan,) = plan_minibatches(lengths_N, 1, mesh.dp.size, self._limits)
        wanted = [plan.samples_of(rank) for rank in self._dp_ranks]
        here = exchange_samples(samples, shapes, wanted, mesh.dp_cp, device)
        microbatches = [
            make_microbatch(here, indices, self._limits, mesh.cp, device)
            for indices in plan.microbatches[mesh.dp.rank]
        ]
        with self._frozen.installed(), evaluating(self._frozen.chunks):
            outputs = run_pass(self._frozen.chunks, microbatches, self._head, backward=False)
        scores_N = torch.zeros(len(shapes), dtype=torch.float64, device=device)
        if mesh.is_last_stage:
            for one, output in zip(microbatches, outputs, strict=True):
                indices_N = torch.tensor(one.samples, dtype=torch.int64, device=device)
                scores_N[indices_N[one.sequence_T[one.mask_T]]] = output["values"][one.mask_T].double()
            # Each sample's last token is on one rank, and 0 on the others.
            dist.all_reduce(scores_N, group=mesh.dp_cp.group)
        if mesh.pp.size > 1:
            dist.broadcast(scores_N, group=mesh.pp.group, group_src=mesh.pp.size - 1)
        group_size = len(groups[0].completions) if groups else 0
        return scores_N[first : first + len(own)].view(len(groups), group_size).cpu()


class RewardModels:
    """The parts of the reward that are models. Every method is collective over the world."""

    def __init__(self, models: Sequence[RewardModel], mesh: Mesh, *, normalize: bool) -> None:
        """Take the models, and whether their scores are normalised by the mean and deviation of all scores so far."""
        self._models = models
        self._mesh = mesh
        self._normalizes = normalize
        self.moments: dict[str, list[float]] = {}
        """Count, mean and sum of squared differences of the scores that each part has given in training."""

    @property
    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes of each reward model on this rank between passes."""
        return [model.waiting_bytes for model in self._models]

    def scores(self, groups: Sequence[Group], *, are_counted: bool) -> Mapping[str, Tensor]:
        """Return by part the scores `[P, G]` of this replica's completions, normalised where that is asked for.

        Args:
            groups: this replica's completions.
            are_counted: whether mean and deviation take these scores in; those of an evaluation are not.
        """
        found = {}
        for model in self._models:
            scores_PG = model.scores(groups)
            if self._normalizes:
                if are_counted:
                    self._count(model.part, scores_PG.flatten())
                count, mean, squares = self.moments.get(model.part, [0.0, 0.0, 0.0])
                # Without two different scores there is no scale yet.
                deviation = sqrt(squares / (count - 1)) if count > 1 and squares > 0 else 1.0
                scores_PG = (scores_PG - mean) / deviation
            found[model.part] = scores_PG
        return found

    def _count(self, part: str, scores_N: Tensor) -> None:
        """Take in the finite scores of all replicas, in the order of the ranks, so that all ranks add alike."""
        gathered: list[list[float]] = [[]] * self._mesh.dp_cp.size
        dist.all_gather_object(gathered, scores_N.tolist(), group=self._mesh.dp_cp.group)
        scores_N = torch.tensor([score for scores in gathered for score in scores], dtype=torch.float64)
        scores_N = scores_N[scores_N.isfinite()]
        if not len(scores_N):
            return
        before, mean, squares = self.moments.get(part, [0.0, 0.0, 0.0])
        more, new_mean = len(scores_N), scores_N.mean().item()
        count, shift = before + more, new_mean - mean
        # Chan's update: the sums of squares about both means, and what their distance adds.
        squares += (scores_N - new_mean).square().sum().item() + shift**2 * before * more / count
        self.moments[part] = [count, mean + shift * more / count, squares]
