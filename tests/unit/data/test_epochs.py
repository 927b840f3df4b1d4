"""Epochs of data for pretraining: what a longer run reads, against Megatron's own datasets."""

from collections import Counter

import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from mcore_rl.data.indexed import SampleCounts, _megatron_config, plan_data
from tests.unit.data.test_index_file import write
from tests.unit.data.test_indexed import SEQ, build, config, numbered

pytestmark = pytest.mark.usefixtures("world_of_one")


def sequences_of(dataset, count):
    return [tuple(dataset[index]["tokens"].tolist()) for index in range(count)]


def read(data, samples, tmp_path):
    """What a run of so many samples reads, with a cache of its own."""
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


@pytest.mark.parametrize("weights", [None, (3.0, 1.0)])
def test_a_longer_run_begins_like_a_shorter_one(tmp_path, weights):
    prefixes = [write(tmp_path / "a", numbered(0, 10))]
    if weights:
        prefixes.append(write(tmp_path / "b", numbered(1000, 30)))
    data = config(*prefixes, train_weights=weights or ())
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


@pytest.mark.parametrize("weights", [None, (3.0, 1.0)])
def test_whole_is_one_order_as_long_as_it_is_described_alike(tmp_path, weights):
    """The order of Megatron's own datasets for all numbers of samples, by their indices."""
    prefixes = [write(tmp_path / "a", numbered(0, 10))]
    if weights:
        prefixes.append(write(tmp_path / "b", numbered(1000, 30)))
    data = config(*prefixes, train_weights=weights or (), shuffle="whole")
    cache = tmp_path / "cache"
    orders: dict[str, set[bytes]] = {}
    for samples in range(1, 70):
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
