"""Epochs of data for pretraining: what a longer run reads, against Megatron's own datasets."""

import os
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from rich.console import Console

from mcore_rl.config.data import DataConfig, TokenizerConfig
from mcore_rl.data.index_file import read_sidecar
from mcore_rl.data.megatron.indexed import SampleCounts, _megatron_config, build_datasets, plan_data
from mcore_rl.data.megatron.preprocess import preprocess
from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer
from mcore_rl.errors import DataError
from tests.unit.data.conftest import JSONL, made_up_documents, preprocessing, write_jsonl
from tests.unit.data.test_index_file import write

pytestmark = pytest.mark.usefixtures("world_of_one")
SEQ = 16


def numbered(first, documents, length=20):
    """Documents whose tokens are all different, over the whole dataset."""
    return [list(range(first + i * length, first + (i + 1) * length)) for i in range(documents)]


def config(*train, **more):
    return DataConfig(train=tuple(map(str, train)), seq_length=SEQ, **{"split": (100.0, 0.0, 0.0), **more})


def build(config, train, valid=0, test=0, *, cache, vocab_size=60_000, seed=7):
    plan = plan_data(config, vocab_size=vocab_size, samples=SampleCounts(train=train, valid=valid, test=test))
    return build_datasets(plan, seed=seed, cache_dir=cache)


def tokens_of(dataset, count=None):
    return [token for i in range(count or len(dataset)) for token in dataset[i]["tokens"].tolist()]


def test_a_sample_is_tokens_their_successors_full_weights_and_positions(tmp_path):
    prefix = write(tmp_path / "data", numbered(0, 50))
    train = build(config(prefix), 40, cache=tmp_path / "cache").train
    sample = train[3]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert sample["tokens"].dtype == sample["labels"].dtype == sample["position_ids"].dtype == torch.int64
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
    assert sample["loss_mask"].tolist() == [1.0] * SEQ
    assert sample["position_ids"].tolist() == list(range(SEQ))


def test_an_epoch_holds_each_token_once_in_runs_that_are_in_the_documents(tmp_path):
    prefix = write(tmp_path / "data", numbered(0, 40))
    train = build(config(prefix), 10, cache=tmp_path / "cache").train
    assert len(train) == (40 * 20 - 1) // SEQ
    tokens = Counter(tokens_of(train))
    assert max(tokens.values()) == 1
    assert len(tokens) == len(train) * SEQ
    for i in range(len(train)):
        for token, label in zip(train[i]["tokens"].tolist(), train[i]["labels"].tolist(), strict=True):
            assert label == token + 1 or (token % 20 == 19 and label % 20 == 0)


def test_the_order_is_that_of_the_seed(tmp_path):
    data = config(write(tmp_path / "data", numbered(0, 40)))
    orders = [tokens_of(build(data, 40, cache=tmp_path / f"c{i}", seed=s).train) for i, s in enumerate((1, 1, 2))]
    assert orders[0] == orders[1] != orders[2]


def test_special_ids_inside_the_data_are_trained_on_as_they_are(tmp_path):
    documents = [[0, 1, 2, 3, 65, 0, 3, 2] * 10]
    sample = build(config(write(tmp_path / "data", documents)), 2, cache=tmp_path / "cache").train[0]
    assert {0, 1, 2, 3} <= set(sample["labels"].tolist())
    assert sample["loss_mask"].sum() == SEQ


@pytest.mark.parametrize(("weights", "expected"), [((), 0.25), ((3.0, 1.0), 0.75)], ids=["by tokens", "by weights"])
def test_a_blend_goes_by_tokens_or_its_weights_and_beyond_an_epoch(tmp_path, weights, expected):
    prefixes = [write(tmp_path / "small", numbered(0, 10)), write(tmp_path / "large", numbered(1000, 30))]
    samples = 400  # an epoch of both has 49
    train = build(config(*prefixes, train_weights=weights), samples, cache=tmp_path / "cache").train
    assert len(train) >= samples
    share = sum(token < 1000 for token in tokens_of(train, samples)) / (samples * SEQ)
    assert share == pytest.approx(expected, abs=0.02 if weights == () else 0.01)


@pytest.mark.parametrize("split", [(80.0, 15.0, 5.0), (0.8, 0.15, 0.05)])
def test_a_split_parts_the_documents_in_their_order(tmp_path, split):
    data = config(write(tmp_path / "data", numbered(0, 100)), split=split)
    datasets = build(data, 20, 10, 4, cache=tmp_path / "cache")
    train, valid, test = (tokens_of(d) for d in (datasets.train, datasets.valid, datasets.test))
    assert max(train) < 80 * 20 <= min(valid)
    assert max(valid) < 95 * 20 <= min(test)


def test_a_tiny_share_is_not_mistaken_for_several_numbers_and_a_split_that_nobody_reads_is_not_built(tmp_path):
    """1e-05 in Megatron's notation would be read as 1 and 05; of 2,000 tokens it is less than a sequence."""
    data = config(write(tmp_path / "data", numbered(0, 100)), split=(1.0, 1e-05, 1e-05))
    datasets = build(data, 20, cache=tmp_path / "cache")
    assert len(datasets.train) == (100 * 20 - 1) // SEQ
    assert (datasets.valid, datasets.test) == (None, None)


def test_data_of_its_own_for_valid_leaves_train_whole(tmp_path):
    train = write(tmp_path / "train", numbered(0, 40))
    valid = write(tmp_path / "valid", numbered(5000, 40))
    data = config(train, valid=(valid,), split=(50.0, 25.0, 25.0))
    datasets = build(data, 49, 20, 7, cache=tmp_path / "cache")
    assert max(tokens_of(datasets.train)) > 38 * 20
    assert min(tokens_of(datasets.valid)) >= 5000
    assert datasets.test is None


def test_data_made_anew_under_its_name_is_not_read_with_the_old_index(tmp_path):
    prefix = write(tmp_path / "data", numbered(0, 100))
    build(config(prefix), 20, cache=tmp_path / "cache")
    write(tmp_path / "data", numbered(0, 50, length=30))
    again = build(config(prefix), 20, cache=tmp_path / "cache").train
    fresh = build(config(prefix), 20, cache=tmp_path / "other").train
    assert tokens_of(again) == tokens_of(fresh)


def test_a_disk_that_is_full_for_the_cache_is_explained(tmp_path):
    data = config(write(tmp_path / "data", numbered(0, 100)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))  # stands for a full disk
        with pytest.raises(
            DataError, match=r"index cache cannot be written to .*/cache: .* GiB are free .*cache_dir\.$"
        ):
            build(data, 400, cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(build(data, 400, cache=tmp_path / "cache").train) >= 400


def test_a_cache_file_that_a_killed_run_left_half_written_is_made_again(tmp_path):
    data, cache = config(write(tmp_path / "data", numbered(0, 100))), tmp_path / "cache"
    whole = tokens_of(build(data, 20, cache=cache).train)
    for path in cache.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:-5])
        assert tokens_of(build(data, 20, cache=cache).train) == whole
        path.write_bytes(path.read_bytes()[:20])
        assert tokens_of(build(data, 20, cache=cache).train) == whole


@pytest.fixture
def shared():
    """A folder that other users see, and an act by which this process becomes another user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name), lambda: os.seteuid(65534) if os.geteuid() == 0 else None
        if os.getuid() == 0:
            os.seteuid(0)
        for folder in Path(name).glob("cache*"):
            folder.chmod(0o755)


@pytest.mark.parametrize("folder_mode", [0o555, 0o1777], ids=oct)
@pytest.mark.parametrize("split", [(100.0, 0.0, 0.0), (90.0, 10.0, 0.0)], ids=["whole", "cut in documents"])
def test_a_cache_serves_other_users_than_the_first(shared, folder_mode, split):
    """Without root to change users there is the folder alone that may not be written to."""
    folder, become_another = shared
    valid = 2 if split[1] else 0
    prefixes = [write(folder / name, [list(range(400))]) for name in "ab"]
    data, cache = config(*prefixes, split=split), folder / "cache"
    cache.mkdir()
    cache.chmod(folder_mode | 0o700)
    first = tokens_of(build(data, 60, valid, cache=cache).train)
    written = {path.name: path.lstat().st_mtime_ns for path in cache.iterdir()}
    cache.chmod(folder_mode)
    become_another()
    assert tokens_of(build(data, 60, valid, cache=cache).train) == first
    assert {path.name: path.lstat().st_mtime_ns for path in cache.iterdir()} == written
    if folder_mode & 0o222:
        assert len(build(data, 90, valid, cache=cache).train) > len(first) // SEQ
        assert (cache / "lock").stat().st_mode & 0o777 == 0o666


def test_arrays_of_a_user_in_the_cache_folder_stay(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "mine.npy").write_bytes(b"not the whole of an array")
    (cache / f"{'0' * 31}-GPTDataset-train-document_index.npy").touch()
    build(config(write(tmp_path / "data", numbered(0, 100))), 20, cache=cache)
    assert (cache / "mine.npy").read_bytes() == b"not the whole of an array"
    assert (cache / f"{'0' * 31}-GPTDataset-train-document_index.npy").exists()


def test_a_cache_is_used_again(tmp_path):
    data, cache = config(write(tmp_path / "data", numbered(0, 100))), tmp_path / "cache"
    build(data, 20, cache=cache)
    written = {path: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    time.sleep(0.01)
    build(data, 20, cache=cache)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.npy")} == written
    assert len(written) == 3


def refused(message, data, train=4, valid=0, vocab_size=60_000):
    with pytest.raises(DataError, match=message):
        plan_data(data, vocab_size=vocab_size, samples=SampleCounts(train=train, valid=valid))


def test_a_split_of_one_book_cuts_it_where_the_parts_meet(tmp_path):
    prefix = write(tmp_path / "book", [list(range(5000))])
    data = config(prefix, split=(90.0, 6.0, 4.0))
    built = build(data, 281, 18, 12, cache=tmp_path / "cache")  # 4500, 300 and 200 tokens: 281, 18 and 12 sequences
    found = [
        Counter(tokens_of(part, count))
        for part, count in zip((built.train, built.valid, built.test), (281, 18, 12), strict=True)
    ]
    assert [set(part.values()) for part in found] == [{1}, {1}, {1}]
    assert (max(found[0]), min(found[1]), max(found[1]), min(found[2])) == (4495, 4500, 4787, 4800)
    again = build(data, 281, 18, 12, cache=tmp_path / "cache")
    assert tokens_of(again.train, 281) == tokens_of(built.train, 281)


def test_documents_are_cut_only_where_whole_ones_do_not_fill_the_parts(tmp_path):
    prefix = write(tmp_path / "data", numbered(0, 50))
    plan = plan_data(config(prefix, split=(90.0, 10.0, 0.0)), vocab_size=60_000, samples=SampleCounts(train=4, valid=2))
    assert plan.ranges == {} and plan.warnings == ()
    prefix = write(tmp_path / "books", [list(range(3000)), list(range(3000, 4000))])
    plan = plan_data(config(prefix, split=(95.0, 5.0, 0.0)), vocab_size=60_000, samples=SampleCounts(train=4, valid=2))
    assert [bounds for _, bounds in plan.ranges.values()] == [(0, 3800, 4000, 4000)]
    assert "cuts the documents in which its parts meet" in plan.warnings[0]


def test_too_little_data_is_refused(tmp_path):
    refused("the train part of .* has 16 tokens", config(write(tmp_path / "a", [[1] * 16])))
    plan_data(config(write(tmp_path / "b", [[1] * 17])), vocab_size=9, samples=SampleCounts(train=1))


@pytest.mark.parametrize(("wanted", "at_once", "found"), [(4, 1, 4), (5, 1, 4), (9, 3, 3), (5, 5, 0)])
def test_an_evaluation_reads_no_sequence_twice_but_fewer_with_a_warning(wanted, at_once, found, tmp_path):
    train, valid = write(tmp_path / "a", numbered(0, 40)), write(tmp_path / "b", numbered(0, 4))
    data = config(train, valid=(valid,))  # 79 // 16 = 4 sequences
    samples = SampleCounts(train=4, valid=wanted)
    plan = plan_data(data, vocab_size=60_000, samples=samples, evaluated_at_once=at_once)
    assert plan.samples.valid == found
    assert bool(plan.warnings) == (found < wanted)
    assert not plan.warnings or f"{found} are read in place of {wanted}" in plan.warnings[0]


@pytest.mark.parametrize(
    ("num_prefixes", "changes", "valid", "message"),
    [
        (0, {}, 0, "data.train names no data"),
        (1, {}, 4, "no data to evaluate on"),
        (2, {"train_weights": (1.0,)}, 0, "1 numbers for the 2 prefixes"),
        (2, {"train_weights": (1.0, 0.0)}, 0, "above 0"),
        (2, {"train_weights": (1.0, -2.0)}, 0, "above 0"),
    ],
)
def test_data_that_makes_no_blend_is_refused(tmp_path, num_prefixes, changes, valid, message):
    prefix = write(tmp_path / "data", numbered(0, 40))
    refused(message, config(*[prefix] * num_prefixes, **changes), valid=valid)


def test_a_token_beyond_the_models_vocabulary_is_refused(tmp_path):
    prefix = write(tmp_path / "data", [[5] * 400, [5, 399], [5] * 40])
    refused(
        r"data\.bin \(uint16\) holds the token 399 in document 1 at position 1, both from 0, and model.vocab_size=399 "
        "allows ids from 0 to 398. Set model.vocab_size",
        config(prefix),
        vocab_size=399,
    )
    plan_data(config(prefix), vocab_size=400, samples=SampleCounts(train=4))


@pytest.mark.parametrize(("dtype", "token"), [(numpy.int8, -1), (numpy.int16, 40_000 - 2**16), (numpy.int32, -100)])
def test_a_token_below_zero_is_refused(tmp_path, dtype, token):
    """A builder wraps the ids of a vocabulary that is too large for int16; -1 is also Megatron's padding."""
    prefix = write(tmp_path / "data", [[5] * 40, [], [5, 6, 7, token, 8]], dtype)
    refused(
        rf"data\.bin \({numpy.dtype(dtype).name}\) holds the token {token} in document 2 at position 3, "
        "both from 0, and model.vocab_size=60000 allows ids from 0 to 59999. .* in a larger type",
        config(prefix),
    )


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    """A preprocessed dataset with its sidecar."""
    folder = tmp_path_factory.mktemp("made")
    text = write_jsonl(folder / "text.jsonl", made_up_documents(20, words=40))
    preprocess(preprocessing(tokenizer, folder / "data", text), Console(quiet=True))
    return folder / "data"


def other_tokenizer(tokenizer, tmp_path):
    """Another file of the same size in tokens."""
    text = write_jsonl(tmp_path / "text.jsonl", made_up_documents(30, words=100, seed=5))
    output = tmp_path / "other.model"
    train_tokenizer(TokenizerTraining(inputs=(text,), output=output, document_format=JSONL, vocab_size=400))
    return TokenizerConfig(kind="sentencepiece", path=str(output))


@pytest.mark.parametrize("cache", ["file/cache", "a" * 300])
def test_a_cache_folder_that_cannot_be_made_is_refused(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    data = write(tmp_path / "data", numbered(0, 10, 8))
    with pytest.raises(DataError, match=r"another data\.cache_dir"):
        build(config(data), train=4, cache=Path(cache))


def test_data_and_its_tokenizer_fit(made, tokenizer, tmp_path):
    datasets = build(config(made, tokenizer=tokenizer), 10, cache=tmp_path / "cache", vocab_size=400)
    assert max(tokens_of(datasets.train)) < 400
    plan_data(config(made, tokenizer=tokenizer), vocab_size=512, samples=SampleCounts(train=4))


def test_a_model_with_fewer_tokens_than_the_tokenizer_is_refused(made, tokenizer, tmp_path):
    without_sidecar = write(tmp_path / "data", numbered(0, 10, 8))
    message = r"has 400 tokens, and model.vocab_size is 399. Set model.vocab_size=400"
    for prefix in (made, without_sidecar):
        refused(message, config(prefix, tokenizer=tokenizer), vocab_size=399)
    refused("with a tokenizer of 400 tokens.* Set model.vocab_size=400", config(made), vocab_size=399)


def test_another_tokenizer_of_the_same_size_is_refused(made, tokenizer, tmp_path):
    refused("was made with the tokenizer", config(made, tokenizer=other_tokenizer(tokenizer, tmp_path)))


def test_a_blend_of_two_tokenizers_is_refused(made, tokenizer, tmp_path):
    text = write_jsonl(tmp_path / "more.jsonl", made_up_documents(5, words=40))
    preprocess(preprocessing(other_tokenizer(tokenizer, tmp_path), tmp_path / "data", text), Console(quiet=True))
    refused("made with different tokenizers", config(made, tmp_path / "data"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"documents": 20', '"documents": 21'), "describes 21 documents"),
        (lambda text: text.replace('"version": 1', '"version": 9'), "has version 9"),
        (lambda text: text.replace('"eod_id"', '"end_id"'), "has the fields"),
        (lambda text: text[:50], "is not JSON"),
    ],
)
def test_a_sidecar_that_is_not_of_this_dataset_is_refused(made, tmp_path, change, message):
    for ending in (".bin", ".idx"):
        (tmp_path / f"data{ending}").write_bytes(made.with_suffix(ending).read_bytes())
    (tmp_path / "data.json").write_text(change(made.with_suffix(".json").read_text()))
    refused(message, config(tmp_path / "data"))


def test_a_sidecar_is_read_as_it_was_written(made):
    sidecar = read_sidecar(str(made))
    assert sidecar.to_json() == made.with_suffix(".json").read_bytes()
    assert numpy.dtype(sidecar.dtype) == numpy.uint16


def sequences_of(dataset, count):
    return [tuple(dataset[index]["tokens"].tolist()) for index in range(count)]


def read(data, samples, tmp_path):
    return sequences_of(build(data, samples, cache=tmp_path / f"cache{samples}").train, samples)


def test_each_epoch_has_every_sequence_once_in_an_order_of_its_own(tmp_path):
    data = config(write(tmp_path / "data", numbered(0, 40)))
    epoch = (40 * 20 - 1) // SEQ
    sequences = read(data, round(2.9 * epoch), tmp_path)
    epochs = [sequences[begin : begin + epoch] for begin in (0, epoch, 2 * epoch)]
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert max(Counter(epochs[0]).values()) == 1
    assert len(set(epochs[2])) == len(epochs[2]) and set(epochs[2]) < set(epochs[0])
    in_place = [sum(a == b for a, b in zip(epochs[0], other, strict=False)) for other in epochs[1:]]
    assert max(in_place) < epoch / 4


@pytest.mark.full
@pytest.mark.parametrize("split", [(100.0, 0.0, 0.0), (90.0, 10.0, 0.0)], ids=["whole", "cut in documents"])
def test_sources_of_one_length_have_orders_of_their_own_after_the_first_epoch(tmp_path, split):
    """Numbered tokens: a source's sequence is known by its first one, less that of the source."""
    prefixes = [
        write(tmp_path / name, [list(range(2000 * i, 2000 * i + size))])
        for i, (name, size) in enumerate([("a", 1601), ("b", 1601), ("c", 1000), ("d", 1601)])
    ]
    data = config(*prefixes, split=split, train_weights=(1.0,) * 4)
    count, valid = 800, 2 if split[1] else 0  # two epochs of each of four
    train = build(data, count, valid, cache=tmp_path / "cache").train
    samples = [tokens[0] for tokens in sequences_of(train, count)]
    orders = [[first - 2000 * i for first in samples if first // 2000 == i] for i in range(4)]
    plan = plan_data(data, vocab_size=60_000, samples=SampleCounts(train=4, valid=valid))
    per_epoch = plan.sources[0].sequences
    assert bool(plan.ranges) == bool(valid) and per_epoch == (90 if valid else 100)
    epochs = [order[per_epoch : 2 * per_epoch] for order in (orders[0], orders[1], orders[3])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) and len(set(epochs[0])) == per_epoch
    assert len(set(map(tuple, epochs))) == 3


def test_the_order_of_later_epochs_is_that_of_the_seed_and_the_epoch_alone_without_twins(tmp_path):
    """An order of numpy's own generator, as earlier versions had it for every source."""
    per_epoch = (40 * 20 - 1) // SEQ
    sequences = read(config(write(tmp_path / "data", numbered(0, 40))), 3 * per_epoch, tmp_path)
    for epoch in (1, 2):
        order = numpy.random.default_rng((7, epoch)).permutation(per_epoch)
        assert sequences[epoch * per_epoch : (epoch + 1) * per_epoch] == [sequences[index] for index in order]


def one_or_two_sources(tmp_path, weights, **changes):
    prefixes = [write(tmp_path / "a", numbered(0, 10))]
    if weights:
        prefixes.append(write(tmp_path / "b", numbered(1000, 30)))
    return config(*prefixes, train_weights=weights, **changes)


@pytest.mark.parametrize("weights", [(), (3.0, 1.0)])
def test_a_longer_run_begins_like_a_shorter_one(tmp_path, weights):
    data = one_or_two_sources(tmp_path, weights)
    runs = [read(data, samples, tmp_path) for samples in (9, 30, 41, 200)]
    for run in runs[:-1]:
        assert run == runs[-1][: len(run)]


def test_the_first_epoch_is_megatrons(tmp_path):
    data = config(write(tmp_path / "data", numbered(0, 40)))
    plan = plan_data(data, vocab_size=60_000, samples=SampleCounts(train=40))
    megatron = BlendedMegatronDatasetBuilder(
        GPTDataset, [40, 0, 0], lambda: True, _megatron_config(plan, 7, tmp_path / "megatrons")
    ).build()[0]
    assert read(data, 150, tmp_path)[:40] == sequences_of(megatron, 40)


@pytest.mark.matrix("weights0")
@pytest.mark.parametrize("weights", [(), (3.0, 1.0)])
def test_whole_is_one_order_as_long_as_it_is_described_alike(tmp_path, weights):
    """The order of Megatron's own datasets for numbers of samples up to some epochs, by their indices."""
    data = one_or_two_sources(tmp_path, weights, shuffle="whole")
    cache = tmp_path / "cache"
    orders: dict[str, set[bytes]] = {}
    for samples in range(1, 70, 3):
        plan = plan_data(data, vocab_size=60_000, samples=SampleCounts(train=samples))
        train = build(data, samples, cache=cache).train
        sources = train.datasets if weights else [train]
        assert {type(source) for source in sources} == {GPTDataset}
        for source, dataset in zip(plan.sources, sources, strict=True):
            order = dataset.document_index.tobytes() + dataset.shuffle_index.tobytes()
            orders.setdefault(f"{source.prefix}: {source.whole_order()}", set()).add(order)
    assert len(orders) > 5
    assert {len(found) for found in orders.values()} == {1}
    assert len(set.union(*orders.values())) == len(orders)


def test_the_sources_are_described_with_tokens_shares_and_epochs(tmp_path):
    prefixes = [write(tmp_path / "a", numbered(0, 10)), write(tmp_path / "b", numbered(1000, 100, 170))]
    data = config(*prefixes, train_weights=(3.0, 1.0))
    plan = plan_data(data, vocab_size=60_000, samples=SampleCounts(train=48))
    # 200 and 17,000 tokens are 12 and 1,062 sequences of 16 with a label each; 36 and 12 of 48 are read.
    assert [source.describe(48) for source in plan.sources] == [
        f"{prefixes[0]} has 200 tokens to train on, 12 sequences; 75.00% of the run's, 3.00 epochs",
        f"{prefixes[1]} has 17,000 tokens to train on, 1,062 sequences; 25.00% of the run's, 0.01 epochs",
    ]
