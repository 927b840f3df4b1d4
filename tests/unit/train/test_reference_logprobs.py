"""The reference of a run: which it is, that it stays the same, and the cache of its logprobs."""

import json

import numpy
import pytest
import torch

from mcore_rl.config.preferences import DPOConfig, DPOSection
from mcore_rl.config.run import CheckpointConfig, TrainConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.train.preferences import cache_path, find_origin, read_cached, refuse_changed_origin, write_cached
from mcore_rl.train.run_folder import RunFolder
from tests.unit.train.test_preference_losses import preferences


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return RunFolder(path)


def checkpoint(path, content="1"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "checkpoint.json").write_text(content)
    return path


def config_of(load=None, **dpo):
    return DPOConfig(checkpoint=CheckpointConfig(load=str(load) if load else None), dpo=DPOSection(**dpo))


def test_a_run_that_resumes_has_the_reference_of_its_first_start(tmp_path, folder):
    first = checkpoint(tmp_path / "sft/checkpoints/iter_0000001")
    config = config_of(tmp_path / "sft")
    origin = find_origin(config, folder)
    assert origin.checkpoint == str(first)
    # A later checkpoint of the same folder is not what a run began from that has saved one of its own.
    later = checkpoint(tmp_path / "sft/checkpoints/iter_0000002", "2")
    (folder.checkpoints / "iter_0000005").mkdir(parents=True)
    assert find_origin(config, folder) == origin
    refuse_changed_origin(origin)
    (folder.checkpoints / "iter_0000005").rmdir()
    assert find_origin(config, folder).checkpoint == str(later)


def test_a_reference_that_changed_or_is_gone_is_refused(tmp_path, folder):
    path = checkpoint(tmp_path / "sft/checkpoints/iter_0000001")
    origin = find_origin(config_of(tmp_path / "sft"), folder)
    (folder.checkpoints / "iter_0000005").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r'dpo.reference is "none" in the run that resumes, "other" here'):
        find_origin(config_of(tmp_path / "sft", reference="other"), folder)
    checkpoint(path, "another")
    with pytest.raises(CheckpointError, match="iter_0000001 is not the reference any more"):
        refuse_changed_origin(origin)
    (folder.path / "reference.json").unlink()
    with pytest.raises(CheckpointError, match=r"reference.json is gone"):
        find_origin(config_of(tmp_path / "sft"), folder)


def test_random_weights_are_a_reference_only_while_their_logprobs_are_cached(folder):
    origin = find_origin(config_of(), folder)
    assert json.loads((folder.path / "reference.json").read_text())["fingerprint"] == "train.seed=1234"
    with pytest.raises(CheckpointError, match="the run began from random weights"):
        refuse_changed_origin(origin)


def test_the_cache_is_of_this_data_reference_and_model_and_shared_by_runs(tmp_path, folder):
    checkpoint(tmp_path / "a/iter_0000001")
    checkpoint(tmp_path / "b/iter_0000001", "2")
    config = config_of(tmp_path / "a", reference_cache=str(tmp_path / "cache"))
    origin = find_origin(config, folder)
    data = preferences()
    path = cache_path(config, origin, data, folder.path)
    assert path.parent == tmp_path / "cache"
    trained = config.model_copy(update={"run_dir": "other", "train": TrainConfig(seed=7)})
    assert cache_path(trained, origin, data, folder.path) == path
    other = find_origin(config_of(tmp_path / "b"), folder)
    ids = data.ids_T.copy()
    ids[3] += 1
    larger = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 3})})
    paths = {
        cache_path(config, other, data, folder.path),
        cache_path(config, origin, data_with(data, ids), folder.path),
        cache_path(larger, origin, data, folder.path),
        path,
    }
    assert len(paths) == 4


def data_with(data, ids):
    fields = {name: getattr(data, name) for name in data.__dataclass_fields__}
    return type(data)(**fields | {"ids_T": ids})


def test_a_cache_is_read_as_it_was_written_or_named_as_damaged(tmp_path):
    path = tmp_path / "cache/key.npz"
    assert read_cached(path, 5) == (None, "")
    logprobs = -torch.rand(5, dtype=torch.float64)
    write_cached(path, logprobs)
    found, warning = read_cached(path, 5)
    assert torch.equal(found, logprobs) and not warning
    content = bytearray(path.read_bytes())
    for damage in (content[:50], b"", bytes([*content[:160], content[160] ^ 1, *content[161:]])):
        path.write_bytes(damage)
        found, warning = read_cached(path, 5)
        assert found is None and "is damaged" in warning
    numpy.savez(path, logprobs=numpy.zeros(4))
    assert read_cached(path, 5)[0] is None
