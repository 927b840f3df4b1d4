"""Training on preferences: pairs of answers as this rank's microbatches, and the loop over batches."""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path
from typing import Protocol

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_rl.config.preferences import DPOConfig, PreferenceRunConfig
from mcore_rl.data.packing import LENGTH_MULTIPLE, PackingLimits
from mcore_rl.data.preference_batches import PackedPreferences, PreferenceOrder, pack_groups, plan_batch
from mcore_rl.data.preferences import Preferences
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.megatron.mesh import Axis, Mesh
from mcore_rl.megatron.platform import to_device
from mcore_rl.megatron.schedule import Head, HeadOutput, ReadsDeferredLogits, run_pass
from mcore_rl.megatron.vocab import Logits, logprobs_and_entropy, zigzag_spans
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.inputs import PackedMicrobatch, localize
from mcore_rl.storage.checkpoint import MARKER, METADATA, find_checkpoint, saved_steps
from mcore_rl.storage.files import checkpoint_errors_explained, write_atomically
from mcore_rl.train.loop import GivenDataTrainer, Run, global_batch_at
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import refuse_no_gradient, train_step, world_sums
from mcore_rl.workers.imports import checkpoint_of

RECORD = "reference.json"
"""File in the run's folder that names the reference; a resumed run keeps this reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOrigin:
    """Origin of the weights of a run's reference model."""

    setting: str
    """`dpo.reference` of the run's first start; empty: the weights that the run started from."""
    checkpoint: str
    """Absolute path of the checkpoint; empty: random weights."""
    fingerprint: str
    """SHA-256 of the file with the checksums of the checkpoint's other files, or the seed of random weights."""


def find_origin(config: DPOConfig, folder: RunFolder) -> ReferenceOrigin:
    """Return the run's reference: the recorded one if the run resumes, else the config's, which is then recorded; only
    the writer of the folder may call this. Raises CheckpointError if there is no such checkpoint or record, ConfigError
    if a resumed run names another reference than at its first start.
    """
    record = folder.path / RECORD
    setting = config.dpo.reference or ""
    with checkpoint_errors_explained(record, "reading or writing"):
        if saved_steps(folder.checkpoints):
            return _recorded(record, setting)
        source = config.dpo.reference or config.checkpoint.load
        checkpoint = None
        if source:
            weights = checkpoint_of(source, config.model, folder.path)
            checkpoint = find_checkpoint(weights).absolute()
        origin = ReferenceOrigin(
            setting=setting,
            checkpoint=str(checkpoint or ""),
            fingerprint=fingerprint(checkpoint) if checkpoint else f"train.seed={config.train.seed}",
        )
        write_atomically(record, json.dumps(asdict(origin), indent=1) + "\n")
    return origin


def _recorded(record: Path, setting: str) -> ReferenceOrigin:
    if not record.exists():
        raise CheckpointError(
            f"{record} is gone, which names the reference that the run resumes with. Start it anew in another run_dir"
        )
    origin = ReferenceOrigin(**json.loads(record.read_text(encoding="utf-8")))
    if origin.setting != setting:
        raise ConfigError(
            f'dpo.reference is "{origin.setting or "none"}" in the run that resumes, "{setting or "none"}" here: its '
            "losses would be of another reference. Set it as it was, or choose another run_dir."
        )
    return origin


def fingerprint(checkpoint: Path) -> str:
    """Return the SHA-256 of the small file that changes with every other file of a checkpoint."""
    marker = checkpoint / MARKER
    return hashlib.sha256((marker if marker.exists() else checkpoint / METADATA).read_bytes()).hexdigest()


def refuse_changed_origin(origin: ReferenceOrigin) -> None:
    """Raise a CheckpointError if the reference's checkpoint has changed since the run's first start."""
    if not origin.checkpoint:
        raise CheckpointError(
            "the run began from random weights, whose logprobs are gone with its cache (dpo.reference_cache), so that "
            "it has no reference. Start it anew in another run_dir"
        )
    path = Path(origin.checkpoint)
    with checkpoint_errors_explained(path, "reading"):
        is_same = path.is_dir() and fingerprint(path) == origin.fingerprint
    if not is_same:
        raise CheckpointError(
            f"{path} is not the reference any more that the run began with, and its logprobs are not cached for this "
            "data. Put the checkpoint back, or start the run anew in another run_dir"
        )


def cache_path(config: DPOConfig, origin: ReferenceOrigin, preferences: Preferences, folder: Path) -> Path:
    """Return the cache file of these logprobs; its name is a digest of everything that determines them."""
    parts = {
        "reference": origin.fingerprint,
        "data": preferences.digest,
        "model": config.model.model_dump(mode="json"),
        "precision": config.platform.precision,
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    cache = config.dpo.reference_cache
    return (folder / "reference_logprobs" if cache == "auto" else Path(cache)) / f"{key}.npz"


def read_cached(path: Path, num_sequences: int) -> tuple[Tensor | None, str]:
    """Return cached logprobs, float64 `[sequences]`, or None if missing or damaged; and a sentence on the damage."""
    if not path.exists():
        return None, ""
    try:
        # The archive has a CRC-32 of its content, which numpy checks.
        with numpy.load(path, allow_pickle=False) as archive:
            logprobs = archive["logprobs"]
        if logprobs.shape != (num_sequences,) or logprobs.dtype != numpy.float64:
            raise ValueError(f"{logprobs.dtype} of shape {logprobs.shape} for {num_sequences} answers")
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        return None, f"warning: {path} is damaged ({error}): the reference's logprobs are computed again"
    return torch.from_numpy(logprobs), ""


def write_cached(path: Path, logprobs: Tensor) -> None:
    """Write the logprobs. Raises CheckpointError if the folder is not writable."""
    content = io.BytesIO()
    numpy.savez(content, logprobs=logprobs.numpy())
    with checkpoint_errors_explained(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceMicrobatch(PackedMicrobatch):
    """One packed sequence of `N` prompts with an answer, and `P` pairs of these sequences, reduced to the `T` positions
    on this context-parallel rank. Every context-parallel rank has all pairs. N and P may be 0.

    Index t of a tensor `[T]` belongs to token t + 1, which is predicted at position t, except in `is_last_T`.
    """

    mask_T: Tensor
    """bool: positions that predict a token of an answer."""
    sequence_T: Tensor
    """int64: sequence (0 ... N - 1) of each position; 0 at padding."""
    is_last_T: Tensor
    """bool: True at each sequence's last token, where the score is read."""
    answer_lengths_N: Tensor
    """int64: number of tokens in each whole answer."""
    pairs_P2: Tensor
    """int64: chosen and rejected sequence of each pair."""
    margins_P: Tensor
    """float32: margin by which the chosen answer is better, from the data."""
    probabilities_P: Tensor
    """float32: probability that the chosen answer is better; 0.5 for a tie."""
    sequences: tuple[int, ...]
    """Index of each sequence in the Preferences."""
    reference_logprobs_N: Tensor | None = None
    """float64: logprob of each whole answer under the reference model, in nats; None without a reference."""
    labels_T: Tensor | None = None
    """float32: probability that a step is correct, at the step's last token, and NaN elsewhere. None without step
    labels."""

    def sequence_sums(self, values_T: Tensor, cp: Axis) -> Tensor:
        """Collective over `cp` (in the forward pass only): sum `[T]` over each whole sequence, float64 `[N]`. Every
        rank of `cp` gets the sum with the gradient of its own part; added up over the ranks, gradients equal those on a
        single rank.
        """
        # Padding belongs to sequence 0, with values of 0. Without sequences a dummy sequence takes it: a microbatch of
        # only padding has no sums, but still a graph that leads back to the model.
        sums_N = values_T.new_zeros(max(1, len(self.sequences)), dtype=torch.float64)
        sums_N = sums_N.index_add(0, self.sequence_T, values_T.double())[: len(self.sequences)]
        if cp.size == 1:
            return sums_N
        whole_N = sums_N.detach().clone()
        dist.all_reduce(whole_N, group=cp.group)
        return whole_N + (sums_N - sums_N.detach())

    def num_pairs(self, cp: Axis) -> Tensor:
        """Return the number of pairs that this rank counts: all pairs on the first rank of `cp`, 0 on the rest."""
        return torch.tensor(len(self.pairs_P2) if cp.rank == 0 else 0, dtype=torch.int, device=self.mask_T.device)


def localize_preferences(
    packed: PackedPreferences, cp: Axis, device: torch.device, reference_logprobs: Tensor | None = None
) -> PreferenceMicrobatch:
    """Return this rank's part of a packed microbatch on the CPU, moved to `device`. `reference_logprobs`, float64, has
    the logprob of each sequence of the Preferences under the reference; None without a reference.
    """
    spans = packed.microbatch.packed
    assert spans is not None, "preferences are packed"
    lengths = spans.cu_seqlens.diff().tolist()

    def on_this_rank(full_S: Tensor) -> Tensor:
        return to_device(zigzag_spans(full_S[None], lengths, cp)[0], device)

    inputs = localize(packed.microbatch, cp, device)
    reference_N = None
    if reference_logprobs is not None:
        reference_N = to_device(reference_logprobs[list(packed.sequences)], device)
    return PreferenceMicrobatch(
        inputs=inputs,
        mask_T=inputs.loss_mask_Bs[0] > 0,
        sequence_T=on_this_rank(packed.sequence_S),
        is_last_T=on_this_rank(packed.is_last_S),
        answer_lengths_N=to_device(packed.answer_lengths_N, device),
        pairs_P2=to_device(packed.pairs_P2, device),
        margins_P=to_device(packed.margins_P, device),
        probabilities_P=to_device(packed.probabilities_P, device),
        sequences=packed.sequences,
        reference_logprobs_N=reference_N,
        labels_T=on_this_rank(packed.step_labels_S) if packed.step_labels_S is not None else None,
    )


def packing_limits(config: PreferenceRunConfig) -> PackingLimits:
    """Return the limits of packed sequences for training on preferences."""
    return PackingLimits(
        max_tokens=config.packed_length,
        multiple=lcm(config.packed_multiple, LENGTH_MULTIPLE),
        sample_multiple=config.mesh.zigzag,
        microbatch_multiple=config.mesh.pp if config.mesh.vpp > 1 else 1,
        is_fixed=config.mesh.pp > 1,
    )


class PreferenceSource:
    """Source of this rank's microbatches for any groups. Every rank makes the same plan, from lengths only."""

    def __init__(
        self, preferences: Preferences, limits: PackingLimits, *, seed: int, pad_id: int, weights: Sequence[float] = ()
    ) -> None:
        """Prepare the source. `weights` are the files' weights in the mixture; empty: every group once per epoch."""
        self.preferences = preferences
        self.order = PreferenceOrder(preferences, seed=seed, weights=weights)
        self._limits = limits
        self._pad_id = pad_id
        self._reference_logprobs: Tensor | None = None

    def microbatches(self, groups: Sequence[int], mesh: Mesh, device: torch.device) -> list[PreferenceMicrobatch]:
        """Return this rank's microbatches for these groups; the number is the same on every data-parallel rank."""
        plan = plan_batch(self.preferences, groups, mesh.dp.size, self._limits)
        return [
            localize_preferences(
                pack_groups(self.preferences, microbatch, self._limits, self._pad_id),
                mesh.cp,
                device,
                self._reference_logprobs,
            )
            for microbatch in plan[mesh.dp.rank]
        ]

    def batches_for_evaluation(self, num_batches: int, global_batch: int) -> Iterator[list[int]]:
        """Yield the groups of up to `num_batches` batches: the same at every call, and no group twice."""
        cursor, num_pairs = 0, self.preferences.num_pairs
        for _ in range(num_batches):
            if cursor >= num_pairs:
                return
            groups = self.order.batch(cursor, min(global_batch, num_pairs - cursor))
            cursor += self.order.num_pairs(groups)
            yield groups

    def num_tokens(self, groups: Sequence[int]) -> int:
        """Return the number of tokens in all sequences of these groups."""
        starts_N, first_G = self.preferences.starts_N, self.preferences.sequence_starts_G
        return sum(int(starts_N[first_G[group + 1]] - starts_N[first_G[group]]) for group in groups)

    def with_reference(self, reference_logprobs: Tensor) -> "PreferenceSource":
        """Return the source with each sequence's logprob under the reference, float64 on the CPU."""
        source = copy(self)
        source._reference_logprobs = reference_logprobs
        return source

    @property
    def mean_length(self) -> float:
        """Sequence length averaged over tokens: sum of squared lengths / sum of lengths."""
        lengths_N = self.preferences.lengths_N.astype("float64")
        return float((lengths_N**2).sum() / lengths_N.sum())


class PreferenceHead(Head[PreferenceMicrobatch], Protocol):
    """An objective on pairs that outputs sums over pairs."""

    def metrics(self, sums: dict[str, float]) -> list[Metric]:
        """Return the metrics of a training step or an evaluation from the world's sums of the outputs, `pairs/*`."""
        ...


class PreferenceTrainer(GivenDataTrainer):
    """Trains on pairs: DPO and its family, reward models. `progress.consumed_samples` counts pairs."""

    def __init__(
        self, run: Run, head: PreferenceHead, *, train: PreferenceSource, valid: PreferenceSource | None
    ) -> None:
        super().__init__(run, train.mean_length)
        self._head, self._train, self._valid = head, train, valid

    def _step(self) -> None:
        state = self.state
        progress = state.progress
        start_s = time.perf_counter()
        with state.timers.phase("data"):
            num_pairs = global_batch_at(state.config.train, progress.consumed_samples)
            groups = self._train.order.batch(progress.consumed_samples, num_pairs)
            microbatches = self._train.microbatches(groups, state.mesh, state.platform.device)
        report = train_step(state, microbatches, self._head)
        refuse_no_gradient(report, progress.step)
        num_pairs, num_tokens = self._train.order.num_pairs(groups), self._train.num_tokens(groups)
        progress.consumed_samples += num_pairs
        progress.consumed_tokens += num_tokens
        self._log_step(
            report,
            self._head.metrics(report.sums),
            num_samples=num_pairs,
            num_tokens=num_tokens,
            step_s=time.perf_counter() - start_s,
        )
        if report.skipped:
            self._report_skip(report)

    def _evaluate(self, *, is_last: bool) -> None:
        num_batches = self.state.config.train.eval_batches
        if self._valid is None or not num_batches:
            return
        with self.state.timers.phase("eval"):
            sums = self._pair_sums(self._valid, num_batches)
        metrics = [Metric(f"eval/{metric.name}", metric.value, metric.count) for metric in self._head.metrics(sums)]
        self.log.write_now(self.state.progress.step, metrics)

    def _pair_sums(self, source: PreferenceSource, num_batches: int) -> dict[str, float]:
        return pair_sums(
            self.state.chunks,
            source,
            self._head,
            self.state.mesh,
            self.state.platform.device,
            num_batches=num_batches,
            global_batch=self.state.config.train.global_batch,
        )


@torch.no_grad()
def pair_sums(
    chunks: Sequence[nn.Module],
    source: PreferenceSource,
    head: PreferenceHead,
    mesh: Mesh,
    device: torch.device,
    *,
    num_batches: int,
    global_batch: int,
) -> dict[str, float]:
    """Collective over the mesh: return the outputs of `head`, summed over up to `num_batches` batches of `global_batch`
    pairs from `source`, without dropout.
    """
    totals: dict[str, float] = {}
    for chunk in chunks:
        chunk.eval()
    for groups in source.batches_for_evaluation(num_batches, global_batch):
        outputs = run_pass(chunks, source.microbatches(groups, mesh, device), head, backward=False)
        for name, value in world_sums(outputs, mesh, device).items():
            totals[name] = totals.get(name, 0.0) + value
    for chunk in chunks:
        chunk.train()
    return totals


class AnswerLogprobHead(ReadsDeferredLogits):
    """Outputs `logprobs` `[N]`: the logprob of each whole answer in nats, float64; there is no loss."""

    wants_losses = False

    def __init__(self, mesh: Mesh, vocab_size: int, chunk_tokens: int) -> None:
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens

    def token_logprobs(self, microbatch: PreferenceMicrobatch, output: Logits) -> Tensor:
        """Collective over tensor parallelism: return logprobs `[T]` of answer tokens from logits; zeros elsewhere."""
        return logprobs_and_entropy(
            output[0],
            microbatch.inputs.labels_Bs[0],
            self._mesh.tp,
            rows_N=microbatch.inputs.rows_N,
            vocab_size=self._vocab_size,
            temperature=1.0,
            chunk_tokens=self._chunk_tokens,
        ).logprobs_T

    def answer_logprobs(self, microbatch: PreferenceMicrobatch, output: Logits) -> Tensor:
        """Collective over the tensor- and context-parallel ranks: return each whole answer's logprob, float64 `[N]`."""
        return microbatch.sequence_sums(self.token_logprobs(microbatch, output), self._mesh.cp)

    def count(self, microbatch: PreferenceMicrobatch) -> Tensor:
        """Return 0: there is no loss."""
        return microbatch.mask_T.new_zeros((), dtype=torch.int)

    def __call__(self, microbatch: PreferenceMicrobatch, output: Logits) -> HeadOutput:
        """Return the logprobs of one microbatch."""
        logprobs_N = self.answer_logprobs(microbatch, output).detach()
        zero = logprobs_N.new_zeros((), dtype=torch.float32)
        return HeadOutput(loss=zero, count=zero.int(), outputs={"logprobs": logprobs_N})


@torch.no_grad()
def answer_logprobs(
    state: TrainState,
    source: PreferenceSource,
    head: AnswerLogprobHead,
    *,
    groups_at_a_time: int,
    before_each: Callable[[], None],
) -> Tensor:
    """Collective over the world: return the logprob of every answer in `source` under the current weights, float64
    `[sequences]` in nats on the CPU, the same on all ranks. A pass has `groups_at_a_time` groups over all ranks.
    """
    mesh, device = state.mesh, state.platform.device
    logprobs = torch.zeros(len(source.preferences.starts_N) - 1, dtype=torch.float64, device=device)
    for chunk in state.chunks:
        chunk.eval()
    for begin in range(0, len(source.preferences), groups_at_a_time):
        before_each()
        groups = range(begin, min(begin + groups_at_a_time, len(source.preferences)))
        microbatches = source.microbatches(groups, mesh, device)
        outputs = run_pass(state.chunks, microbatches, head, backward=False)
        for microbatch, output in zip(microbatches, outputs, strict=False):  # no outputs before the last stage
            # Every context-parallel rank has the whole sums, and they are added up below.
            if mesh.cp.rank == 0:
                logprobs[list(microbatch.sequences)] = output["logprobs"]
    for chunk in state.chunks:
        chunk.train()
    if mesh.is_last_stage:
        # Each answer has its number on one rank and 0 on the others: the sum brings it to all.
        dist.all_reduce(logprobs, group=mesh.dp_cp.group)
    if mesh.pp.size > 1:
        dist.broadcast(logprobs, group=mesh.pp.group, group_src=mesh.pp.size - 1)
    return logprobs.cpu()
