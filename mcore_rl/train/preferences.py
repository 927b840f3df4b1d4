"""Training on preferences: microbatches of whole groups, and the loop that reward models and DPO share."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.data.plan import PackingLimits
from mcore_rl.data.preference_batches import PackedPreferences, PreferenceOrder, pack_groups, plan_batch
from mcore_rl.data.preferences import Preferences
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.mesh import Axis, Mesh
from mcore_rl.parallel.schedule import Head
from mcore_rl.parallel.sequence import zigzag_spans
from mcore_rl.train.batch_size import global_batch_at
from mcore_rl.train.loop import GivenDataTrainer, Run
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import evaluate, train_step

LENGTH_MULTIPLE = 64
"""Packed sequences are padded to a multiple of this: a CPU compiles the kernels of matrix products for each number of
tokens, and the fast ones are for round numbers, there and on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceMicrobatch:
    """One packed sequence of whole groups: the `T` positions of it that this context-parallel rank has."""

    inputs: LocalMicrobatch
    packed: PackedPreferences
    """The whole packed sequence, on the CPU."""
    sequence_T: Tensor
    """int64: sequence of each position; 0 at padding."""
    is_last_T: Tensor
    """bool: the position of a sequence's last token."""
    pairs_P2: Tensor
    """int64: sequences of each pair, chosen and rejected."""
    margins_P: Tensor
    """float32: margin of each pair."""
    probabilities_P: Tensor
    """float32: probability that the chosen answer of a pair is the better one; a half for a tie."""
    answer_lengths_N: Tensor
    """int64: tokens of each sequence's answer."""
    reference_logprobs_N: Tensor | None = None
    """float64: logprob of each whole answer under the reference, in nats; None: there is no reference."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (1) and length of the packed sequence before context parallelism cuts it."""
        return self.inputs.shape

    @property
    def routed_tokens(self) -> Tensor | int:
        """Number of positions on this rank that are no padding."""
        return self.inputs.routed_tokens

    @property
    def packed_spans(self) -> tuple[Tensor, int] | None:
        """Index of each position's sequence, -1 at padding, and the number of spans."""
        return self.inputs.packed_spans

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Return the keyword arguments of a chunk's forward."""
        return self.inputs.model_inputs(with_labels=with_labels)


def localize_preferences(
    packed: PackedPreferences, cp: Axis, device: torch.device, reference_logprobs: Tensor | None = None
) -> PreferenceMicrobatch:
    """Return the part of a packed sequence that this rank's model reads, and its pairs, on the device.

    `reference_logprobs` are those of all answers of the data; None: there is no reference.
    """
    boundaries = packed.microbatch.packed
    assert boundaries is not None, "preferences are packed"
    lengths = boundaries.cu_seqlens.diff().tolist()

    def on_this_rank(full_S: Tensor) -> Tensor:
        return zigzag_spans(full_S[None], lengths, cp)[0].to(device, non_blocking=True)

    reference_N = None
    if reference_logprobs is not None:
        reference_N = reference_logprobs[list(packed.sequences)].to(device, non_blocking=True)
    return PreferenceMicrobatch(
        inputs=localize(packed.microbatch, cp, device),
        packed=packed,
        sequence_T=on_this_rank(packed.sequence_S),
        is_last_T=on_this_rank(packed.is_last_S),
        pairs_P2=packed.pairs_P2.to(device, non_blocking=True),
        margins_P=packed.margins_P.to(device, non_blocking=True),
        probabilities_P=packed.probabilities_P.to(device, non_blocking=True),
        answer_lengths_N=packed.answer_lengths_N.to(device, non_blocking=True),
        reference_logprobs_N=reference_N,
    )


def sequence_totals(values_T: Tensor, sequence_T: Tensor, num_sequences: int, cp: Axis) -> Tensor:
    """Collective over `cp` (forward only): the sum over each whole sequence `[N]`, with the gradient of its part here.

    Every rank of `cp` that computes the whole loss from the sums, and goes backward, adds its own tokens' part of the
    gradient: the sum over the ranks is the whole, without a collective in the backward pass.
    """
    own_N = values_T.new_zeros(num_sequences).index_add(0, sequence_T, values_T)
    if cp.size == 1:
        return own_N
    total_N = own_N.detach().clone()
    dist.all_reduce(total_N, group=cp.group)
    return own_N + (total_N - own_N.detach())


def packing_limits(config: PreferenceRunConfig, mesh: Mesh) -> PackingLimits:
    """Return the lengths of the packed sequences on this mesh."""
    return PackingLimits(
        max_tokens=config.packed_length,
        multiple=lcm(config.packed_multiple, LENGTH_MULTIPLE),
        sample_multiple=config.mesh.zigzag,
        microbatch_multiple=mesh.pp.size if config.mesh.vpp > 1 else 1,
        is_fixed=mesh.pp.size > 1,
    )


class PreferenceBatches:
    """Microbatches of one data set on this rank. Groups are those of the world's batch."""

    def __init__(
        self,
        preferences: Preferences,
        state: TrainState,
        config: PreferenceRunConfig,
        pad_id: int,
        reference_logprobs: Tensor | None = None,
    ) -> None:
        """Prepare the batches.

        Args:
            preferences: The data.
            state: The model's state, whose mesh and device the batches are for.
            config: The run's config.
            pad_id: Token of padding.
            reference_logprobs: float64, logprob of each answer of the data under the reference; None: there is none.
        """
        self.preferences = preferences
        self._state = state
        self._limits = packing_limits(config, state.mesh)
        self._pad_id = pad_id
        self._reference_logprobs = reference_logprobs

    @property
    def mean_length(self) -> float:
        """Length of the sequence that a token sees, averaged over tokens: sum of squares / sum."""
        lengths_N = self.preferences.lengths_N.astype(numpy.float64)
        return float((lengths_N**2).sum() / lengths_N.sum())

    def microbatches(self, groups: Sequence[int]) -> list[PreferenceMicrobatch]:
        """Return this data-parallel rank's microbatches of a batch, the same number on every rank."""
        mesh, device = self._state.mesh, self._state.platform.device
        plan = plan_batch(self.preferences, groups, mesh.dp.size, self._limits)
        return [
            localize_preferences(
                pack_groups(self.preferences, indices, self._limits, self._pad_id),
                mesh.cp,
                device,
                self._reference_logprobs,
            )
            for indices in plan[mesh.dp.rank]
        ]

    def num_tokens(self, groups: Sequence[int]) -> int:
        """Return the tokens of all sequences of these groups."""
        starts_N, sequences_G = self.preferences.starts_N, self.preferences.sequence_starts_G
        return int(sum(starts_N[sequences_G[group + 1]] - starts_N[sequences_G[group]] for group in groups))

    def in_order(self, num_pairs: int, most_pairs: int) -> Iterator[list[int]]:
        """Yield batches of about `num_pairs` pairs from the first group on, the same at every call.

        They end with the data, or when they have `most_pairs` pairs or more.
        """
        sizes_G = numpy.diff(self.preferences.pair_starts_G).tolist()
        batch: list[int] = []
        pairs = total = 0
        for group, size in enumerate(sizes_G):
            batch.append(group)
            pairs, total = pairs + size, total + size
            if pairs >= num_pairs or total >= most_pairs:
                yield batch
                batch, pairs = [], 0
            if total >= most_pairs:
                return
        if batch:
            yield batch


Describe = Callable[[str, dict[str, float]], list[Metric]]
"""Metrics of a head's sums: takes the prefix of their names, "train" or "eval", and what `world_sums` returns."""


class PreferenceTrainer(GivenDataTrainer):
    """Training on pairs of answers. A unit of work is one optimizer step on `train.global_batch` pairs or a few more,
    as a prompt's pairs stay together.
    """

    def __init__(
        self,
        run: Run,
        config: PreferenceRunConfig,
        head: Head[PreferenceMicrobatch],
        describe: Describe,
        *,
        train: PreferenceBatches,
        valid: PreferenceBatches | None,
    ) -> None:
        """Prepare this rank to train.

        Args:
            run: The run, open on all ranks.
            config: Its config.
            head: The training objective, which counts pairs.
            describe: Metrics of the head's outputs.
            train: Preferences to train on.
            valid: Preferences of every evaluation; None: there is none.
        """
        super().__init__(run, train.mean_length)
        self.config = config
        self._head = head
        self._describe = describe
        self._train, self._valid = train, valid
        self._order = PreferenceOrder(
            train.preferences, seed=config.train.seed, weights=config.data.train_weights
        )

    def _step(self) -> None:
        state, progress = self.state, self.state.progress
        global_batch = global_batch_at(state.config.train, progress.consumed_samples)
        start_s = time.perf_counter()
        with state.timers.phase("data"):
            groups = self._order.batch(progress.consumed_samples, global_batch)
            microbatches = self._train.microbatches(groups)
        report = train_step(state, microbatches, self._head)
        num_pairs, num_tokens = self._order.num_pairs(groups), self._train.num_tokens(groups)
        progress.consumed_samples += num_pairs
        progress.consumed_tokens += num_tokens
        self._log_step(
            report,
            self._describe("train", report.sums),
            num_samples=num_pairs,
            num_tokens=num_tokens,
            step_s=time.perf_counter() - start_s,
        )
        self._check_skipped(report)

    def _evaluate(self, *, is_last: bool) -> None:
        """Log the metrics of the validation data's first `eval_batches` batches."""
        train = self.config.train
        if self._valid is None or not train.eval_batches:
            return
        with self.state.timers.phase("eval"):
            sums = self.sums_of(self._valid, train.eval_batches * train.global_batch)
        self.log.write_now(self.state.progress.step, self._describe("eval", sums))

    def sums_of(self, batches: PreferenceBatches, most_pairs: int) -> dict[str, float]:
        """Collective over the mesh: the head's outputs, summed over the first groups with about `most_pairs` pairs."""
        totals: dict[str, float] = {}
        for groups in batches.in_order(self.config.train.global_batch, most_pairs):
            sums = evaluate(self.state, batches.microbatches(groups), self._head)
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
        return totals
