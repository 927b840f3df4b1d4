"""Megatron's GPTDatasets of train, valid and test from a DataConfig: checked first, then built by all ranks."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.config.data import DataConfig
from mcore_rl.data import index_file
from mcore_rl.data.batch import SampleDataset
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.storage.files import disk_errors_explained, make_folder, room_at, sole_writer

APART = 0.8
"""Share of an epoch below which Megatron shuffles the last epoch apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSource:
    """A dataset of the blend to train on."""

    prefix: str
    tokens: int
    share: float
    """Its weight in the blend; the weights add up to 1."""
    sequences: int
    """Whole sequences in an epoch."""
    samples: int
    """Sequences that the run reads, including a blend's reserve."""
    seq_length: int

    def describe(self, train_samples: int) -> str:
        """Return the line for a log of a run that trains on `train_samples` sequences of all sources."""
        epochs = train_samples * self.share / self.sequences
        return (
            f"{self.prefix} has {self.tokens:,} tokens to train on, {self.sequences:,} sequences; "
            f"{self.share:.2%} of the run's, {epochs:,.2f} epochs"
        )

    def whole_order(self) -> str:
        """Return the values that the order of `data.shuffle = "whole"` depends on apart from the seed: runs with the
        same text read the same sequences up to the end of the shorter run.
        """
        # As GPTDataset counts: epochs follow without a gap, and the last label needs one more token.
        num_epochs = -(-(self.samples * self.seq_length + 1) // self.tokens)
        before = ((num_epochs - 1) * self.tokens - 1) // self.seq_length
        is_apart = num_epochs > 1 and self.samples - before < int(APART * self.sequences)
        return f"{num_epochs} epochs shuffled as {'one and the last apart' if is_apart else 'one'}"


@dataclass
class EpochConfig(GPTDatasetConfig):
    """Megatron's config with what an EpochDataset needs besides."""

    twins: Mapping[str, int] = field(default_factory=dict)
    """Prefix -> how many sources before it in the blend have as many sequences, and would have the same orders."""


class EpochDataset(GPTDataset):
    """Repeats one epoch as Megatron cuts and caches it: the first in Megatron's order, later ones in an order of seed,
    epoch and `twins` alone. Tokens that do not fill a last sequence are never used. An order takes 8 bytes a sequence
    and rank.
    """

    def __init__(self, *args: Any) -> None:
        """Take GPTDataset's arguments by position, as its builder gives them; the fourth counts samples."""
        low_level, path, indices, num_samples, *rest = args
        super().__init__(low_level, path, indices, None, *rest)  # None: one epoch
        self._per_epoch = int(super().__len__())
        self._num_epochs: int = max(1, -(-num_samples // self._per_epoch))
        self._order: tuple[int, NDArray[numpy.int64]] | None = None
        self._twin: int = self.config.twins.get(str(path), 0)

    def __len__(self) -> int:
        """Return the number of samples in all epochs that the requested samples begin."""
        return self._num_epochs * self._per_epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample as GPTDataset does, for any index from 0."""
        epoch, place = divmod(int(index), self._per_epoch)
        if epoch:
            order = self._order
            if order is None or order[0] != epoch:
                # A last 0 changes no order: a source without twins goes on as before there were any.
                rng = numpy.random.default_rng((self.config.random_seed, epoch, self._twin))
                # Assigned as a whole: a thread reads ahead while another may ask for an earlier sample.
                self._order = order = epoch, rng.permutation(self._per_epoch)
            place = int(order[1][place])
        sample: dict[str, Tensor] = super().__getitem__(place)
        return sample


BLENDS = ("train", "valid", "test")
NO_TOKEN = -1
"""Padding of a last, partial sequence. It is not in any data, so no real token is mistaken for padding."""
UNKNOWN_EOD = -2
SURPLUS = 0.005
"""Share of samples that each dataset of a blend has in reserve, since the blend rounds."""
OTHER_CACHE = "Make room (or give write access), or set another data.cache_dir."
CACHE_WAIT_S = 120.0
CACHED = re.compile(r"[0-9a-f]{32}-\w+-\w+-\w+_index\.npy")
"""Names of Megatron's cached indices: digest, class, split and kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """Number of sequences that a run reads of each split; a split of 0 is not built."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetBlend:
    """Datasets mixed by weight."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...]
    bounds: tuple[float, float] = (0.0, 1.0)
    """Part of each dataset's documents that belongs to the split, as fractions, in their order on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """Datasets that passed all checks and fit the model."""

    seq_length: int
    blends: tuple[DatasetBlend | None, DatasetBlend | None, DatasetBlend | None]
    """Blends of train, valid and test; None where the split is not built."""
    samples: SampleCounts
    shuffle: Literal["epoch", "whole"]
    sources: tuple[TrainSource, ...]
    split: str
    """Megatron's notation when one blend is cut in three; empty when each split has its own prefixes."""
    tokenizer: "DatasetTokenizer"
    ranges: Mapping[str, tuple[index_file.IndexFile, tuple[int, int, int, int]]] = field(default_factory=dict)
    """Prefix -> its pair and the first token of train, valid, test and the end, where the split cuts documents; else
    empty."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetTokenizer:
    """The tokenizer interface that Megatron's datasets need; `unique_identifiers` goes into the index cache's names."""

    vocab_size: int
    eod: int
    fingerprints: tuple[str, ...]
    """Fingerprints of the .idx files. Megatron's cache is keyed by path: without them, data that was regenerated under
    its old name would be read with the old sample boundaries."""

    @property
    def pad(self) -> int:
        """Return NO_TOKEN, which no real token is equal to."""
        return NO_TOKEN

    @property
    def unique_identifiers(self) -> dict[str, object]:
        """Values that the cuts into samples depend on, apart from path, seed, split and length."""
        return {"vocab_size": self.vocab_size, "eod": self.eod, "fingerprints": list(self.fingerprints)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """Samples of seq_length tokens; each a dict of tokens, labels, loss_mask, position_ids."""

    train: SampleDataset
    valid: SampleDataset | None
    test: SampleDataset | None


def plan_data(config: DataConfig, *, vocab_size: int, samples: SampleCounts, evaluated_at_once: int = 1) -> DataPlan:
    """Read and check all data that `config` names; a DataError is raised before any work, on all ranks.

    With `valid` or `test` nothing is split, and all of `train` is trained on. A split cuts documents only where a part
    would otherwise have no sequence. Evaluation reads no sequence twice: a part may have fewer than `samples`, in
    multiples of `evaluated_at_once`.
    """
    if not config.train:
        raise DataError("data.train names no data. Give it prefixes of .bin/.idx pairs (`mcore-rl data preprocess`).")
    prefixes = tuple(dict.fromkeys((*config.train, *config.valid, *config.test)))
    indexes = {prefix: index_file.read_index(prefix) for prefix in prefixes}
    eod = _check_fit(indexes, config, vocab_size)
    split = "" if config.valid or config.test else ",".join(f"{share:.9f}" for share in config.split)
    blends = _blends(config, indexes, split, samples)
    assert blends[0] is not None  # or _blends has refused
    parts = [_part_tokens(blend, indexes) if blend else {} for blend in blends]
    ranges: dict[str, tuple[index_file.IndexFile, tuple[int, int, int, int]]] = {}
    warnings: list[str] = []
    if split and any(tokens <= config.seq_length for part in parts for tokens in part.values()):
        ranges = {prefix: (indexes[prefix], _token_bounds(config, indexes[prefix])) for prefix in config.train}
        parts = [
            {prefix: bounds[i + 1] - bounds[i] for prefix, (_, bounds) in ranges.items()} if blend else {}
            for i, blend in enumerate(blends)
        ]
        warnings.append(
            "warning: whole documents leave a part of the data without a sequence of data.seq_length tokens: "
            f"data.split={list(config.split)} cuts the documents in which its parts meet"
        )
    for prefix, tokens in parts[0].items():
        index_file.check_enough(prefix, tokens=tokens, seq_length=config.seq_length)
    for name, blend, part in zip(BLENDS[1:], blends[1:], parts[1:], strict=True):
        wanted = getattr(samples, name)
        found = _evaluated(wanted, evaluated_at_once, blend, part, config.seq_length) if blend else 0
        if blend and found < wanted:
            warnings.append(
                f"warning: the {name} part of the data has fewer sequences than an evaluation asks for: {found} are "
                f"read in place of {wanted}{'' if found else ', and there is no evaluation'}. Hold out more text "
                "(data.split, data.valid) for more"
            )
        samples = replace(samples, **{name: found})
    blends = (blends[0], blends[1] if samples.valid else None, blends[2] if samples.test else None)
    fingerprints = tuple(index.fingerprint for index in indexes.values())
    return DataPlan(
        seq_length=config.seq_length,
        blends=blends,
        samples=samples,
        shuffle=config.shuffle,
        sources=_sources(blends[0], parts[0], samples.train, config.seq_length),
        split=split,
        tokenizer=DatasetTokenizer(vocab_size=vocab_size, eod=eod, fingerprints=fingerprints),
        ranges=ranges,
        warnings=tuple(warnings),
    )


def build_datasets(plan: DataPlan, *, seed: int, cache_dir: Path) -> Datasets:
    """Collective over the world: build the datasets; rank 0 writes the index cache, which the others map after a
    barrier. The order depends on data and `seed` alone; with `plan.shuffle` "whole" also on TrainSource.whole_order().
    """
    sizes = [plan.samples.train, plan.samples.valid, plan.samples.test]
    with contextlib.ExitStack() as cache_lock:
        on_rank_zero(lambda: cache_lock.enter_context(_repaired_cache(cache_dir)))
        if plan.ranges:
            plan = on_rank_zero(lambda: _with_ranges_written(plan, cache_dir))
        config = _megatron_config(plan, seed, cache_dir)
        try:
            kind = EpochDataset if plan.shuffle == "epoch" else GPTDataset
            built = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
        except FileNotFoundError as error:
            raise DataError(
                f"data.cache_dir={str(cache_dir)!r}: rank 0 wrote the index cache there, and this node does "
                f"not see it ({error.filename}). Set data.cache_dir to a folder that all nodes share."
            ) from error
        except Exception as error:
            # Megatron raises a plain exception from the disk's error.
            if not isinstance(error.__cause__, OSError):
                raise
            reason = error.__cause__.strerror or error.__cause__  # numpy's error for a short write has only a text
            raise DataError(
                f"the index cache cannot be written to {cache_dir}: {reason}. {room_at(cache_dir)}. {OTHER_CACHE}"
            ) from error
    return Datasets(
        train=cast(SampleDataset, built[0]),
        valid=cast(SampleDataset | None, built[1]),
        test=cast(SampleDataset | None, built[2]),
    )


def _check_fit(indexes: dict[str, index_file.IndexFile], config: DataConfig, vocab_size: int) -> int:
    sidecars = {prefix: index_file.read_sidecar(prefix) for prefix in indexes}
    for prefix, sidecar in sidecars.items():
        if sidecar:
            index_file.check_sidecar(indexes[prefix], sidecar)
    index_file.check_same_tokenizer(sidecars)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer.kind != "none" else None
    if tokenizer and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer {config.tokenizer.path} has {tokenizer.vocab_size} tokens, and model.vocab_size is "
            f"{vocab_size}. Set model.vocab_size={tokenizer.vocab_size}."
        )
    for prefix, sidecar in sidecars.items():
        if tokenizer and sidecar:
            index_file.check_tokenizer(prefix, sidecar, tokenizer, str(config.tokenizer.path))
        index_file.check_vocabulary(indexes[prefix], sidecar, vocab_size)
    if tokenizer:
        return tokenizer.eod_id
    return next((sidecar.eod_id for sidecar in sidecars.values() if sidecar), UNKNOWN_EOD)


def _blends(
    config: DataConfig, indexes: dict[str, index_file.IndexFile], split: str, samples: SampleCounts
) -> tuple[DatasetBlend | None, DatasetBlend | None, DatasetBlend | None]:
    train = _weighted(config.train, config.train_weights, indexes)
    if split:
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        found = [
            DatasetBlend(prefixes=train.prefixes, weights=train.weights, bounds=bounds) if bounds else None
            for bounds in matrix
        ]
    else:
        found = [train, *(_weighted(names, (), indexes) if names else None for names in (config.valid, config.test))]
    if not found[0] or (samples.valid and not found[1]):
        missing = (
            'evaluate on. Name data.valid, or set train.eval_batches="none".'
            if found[0]
            else "train on. Raise its first share."
        )
        raise DataError(f"data.split={config.split}, data.valid={config.valid}: there is no data to {missing}")
    return found[0], found[1] if samples.valid else None, found[2] if samples.test else None


def _weighted(
    prefixes: Sequence[str], weights: Sequence[float], indexes: dict[str, index_file.IndexFile]
) -> DatasetBlend:
    """Return the blend by `weights`, or by tokens: without weights Megatron ends a blend after one epoch."""
    if not weights:
        weights = [float(indexes[prefix].num_tokens) for prefix in prefixes]
    if len(weights) != len(prefixes):
        raise DataError(
            f"data.train_weights has {len(weights)} numbers for the {len(prefixes)} prefixes of data.train."
        )
    if not all(weight > 0 for weight in weights):
        raise DataError(
            f"data.train_weights={tuple(weights)}: each must be above 0. Leave out data that is not wanted."
        )
    total = math.fsum(weights)
    return DatasetBlend(prefixes=tuple(prefixes), weights=tuple(weight / total for weight in weights))


def _part_tokens(blend: DatasetBlend, indexes: dict[str, index_file.IndexFile]) -> dict[str, int]:
    tokens = {}
    for prefix in blend.prefixes:
        lengths_N = indexes[prefix].lengths_N
        first, last = (round(bound * lengths_N.size) for bound in blend.bounds)
        tokens[prefix] = int(lengths_N[first:last].sum(dtype=numpy.int64))
    return tokens


def _token_bounds(config: DataConfig, index: index_file.IndexFile) -> tuple[int, int, int, int]:
    train, valid, _ = (share / sum(config.split) for share in config.split)
    return 0, round(train * index.num_tokens), round((train + valid) * index.num_tokens), index.num_tokens


def _evaluated(wanted: int, at_once: int, blend: DatasetBlend, tokens: dict[str, int], seq_length: int) -> int:
    # The last token of a dataset is a label only.
    sequences = {prefix: max(0, tokens[prefix] - 1) // seq_length for prefix in blend.prefixes}
    if len(sequences) == 1:
        return min(wanted, sum(sequences.values()) // at_once * at_once)
    found = wanted
    while found > 0 and any(
        _samples_of(found, weight) > sequences[prefix]
        for prefix, weight in zip(blend.prefixes, blend.weights, strict=True)
    ):
        found -= at_once
    return max(0, found)


def _samples_of(samples: int, weight: float) -> int:
    """Return the samples that a dataset of a blend is built for: its share, rounded up, with a surplus in reserve."""
    return math.ceil(math.ceil(samples * weight) * (1 + SURPLUS))


def _sources(blend: DatasetBlend, tokens: dict[str, int], samples: int, seq_length: int) -> tuple[TrainSource, ...]:
    return tuple(
        TrainSource(
            prefix=prefix,
            tokens=tokens[prefix],
            share=weight,
            sequences=(tokens[prefix] - 1) // seq_length,
            samples=_samples_of(samples, weight) if len(blend.prefixes) > 1 else samples,
            seq_length=seq_length,
        )
        for prefix, weight in zip(blend.prefixes, blend.weights, strict=True)
    )


def _with_ranges_written(plan: DataPlan, folder: Path) -> DataPlan:
    blends = []
    for i, blend in enumerate(plan.blends):
        prefixes = (
            index_file.write_range(index, bounds[i], bounds[i + 1], folder)
            for index, bounds in (plan.ranges[prefix] for prefix in (blend.prefixes if blend else ()))
        )
        blends.append(DatasetBlend(prefixes=tuple(prefixes), weights=blend.weights) if blend else None)
    return replace(plan, blends=(blends[0], blends[1], blends[2]), split="", ranges={})


def _megatron_config(plan: DataPlan, seed: int, cache_dir: Path) -> EpochConfig:
    # Megatron takes a single prefix without a weight.
    blends = [
        blend and (list(blend.prefixes), list(blend.weights) if len(blend.prefixes) > 1 else None)
        for blend in plan.blends
    ]
    assert plan.blends[0] is not None  # or plan_data has refused
    lengths = dict(zip(plan.blends[0].prefixes, (source.sequences for source in plan.sources), strict=True))
    sequences = list(lengths.values())
    config = EpochConfig(
        twins={prefix: sequences[:index].count(length) for index, (prefix, length) in enumerate(lengths.items())},
        random_seed=seed,
        sequence_length=plan.seq_length,
        blend=blends[0] if plan.split else None,
        blend_per_split=None if plan.split else blends,
        split=plan.split or None,
        path_to_cache=str(cache_dir),
        tokenizer=plan.tokenizer,
        mid_level_dataset_surplus=SURPLUS,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    if plan.split:
        config.split_matrix = [blend.bounds if blend else None for blend in plan.blends]
    return config


@contextlib.contextmanager
def _repaired_cache(folder: Path) -> Iterator[None]:
    """Hold the cache for this process, without a killed writer's half files; read-only caches stay as they are."""
    make_folder(folder, OTHER_CACHE)
    if not os.access(folder, os.W_OK, effective_ids=True):
        yield
        return
    with (
        disk_errors_explained(folder, OTHER_CACHE),
        sole_writer(folder / "lock", wait_s=CACHE_WAIT_S, remedy="Wait, or set another data.cache_dir."),
    ):
        for path in folder.glob("*.npy"):
            # The folder is the user's choice, and may contain other programs' arrays.
            if CACHED.fullmatch(path.name):
                try:
                    # Mapping reads the header alone, and fails where the file is shorter than that says.
                    numpy.load(path, mmap_mode="r")
                except (ValueError, EOFError):
                    path.unlink()
        yield
