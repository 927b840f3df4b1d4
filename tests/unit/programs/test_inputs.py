"""The tokenizer that the checkpoints of a run belong to, and their low-rank adapters."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from mcore_rl.cli.evaluate import checkpoint_to_evaluate, with_stored_adapters
from mcore_rl.config.data import DataConfig, TokenizerConfig
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.preferences import RewardModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.index_file import Sidecar
from mcore_rl.data.tokenizer import HuggingFaceTokenizer
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.programs.inputs import refuse_other_tokenizer
from mcore_rl.storage.checkpoint import Marker, write_marker
from mcore_rl.storage.folders import read_run, run_of_checkpoint


def tokenizer_in(folder: Path, *words: str) -> HuggingFaceTokenizer:
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(["<end>", *words])}
    tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<end>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return HuggingFaceTokenizer(folder)


def test_a_checkpoint_of_another_tokenizer_is_refused_and_an_unknown_one_is_not(tmp_path: Path) -> None:
    one, other = tokenizer_in(tmp_path / "one", "a", "b"), tokenizer_in(tmp_path / "other", "b", "a")
    run = tmp_path / "run"
    checkpoint = run / "checkpoints/iter_0000010"
    checkpoint.mkdir(parents=True)
    named = TokenizerConfig(kind="huggingface", path=str(tmp_path / "one"))
    (run / "config.toml").write_text(dump_config(PretrainConfig(data=DataConfig(tokenizer=named))))
    for load in (run, run / "checkpoints", checkpoint):
        refuse_other_tokenizer(one, str(load))
        with pytest.raises(DataError, match=r"is of a run with the tokenizer .*one, data.tokenizer.path names another"):
            refuse_other_tokenizer(other, str(load))
    refuse_other_tokenizer(other, None)
    refuse_other_tokenizer(other, str(tmp_path / "imported/iter_0000000"))
    evaluated = RlRunConfig(run_dir=str(run))
    assert checkpoint_to_evaluate(None, evaluated.run_dir, named, evaluated.model) == run / "checkpoints"
    with pytest.raises(DataError, match=r"^run_dir=.*/run/checkpoints is of a run with the tokenizer .*one"):
        checkpoint_to_evaluate(
            None, evaluated.run_dir, named.model_copy(update={"path": str(tmp_path / "other")}), evaluated.model
        )
    (tmp_path / "one").rename(tmp_path / "gone")
    refuse_other_tokenizer(other, str(run))


def test_a_run_that_named_no_tokenizer_is_known_by_the_tokenizer_of_its_data(tmp_path: Path) -> None:
    one, other = tokenizer_in(tmp_path / "one", "a", "b"), tokenizer_in(tmp_path / "other", "b", "a")
    run, prefix = tmp_path / "run", tmp_path / "books"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(dump_config(PretrainConfig(data=DataConfig(train=(str(prefix),)))))
    refuse_other_tokenizer(other, str(run))  # data of another tool has no record of its tokenizer
    described = Sidecar(
        tokenizer_kind="huggingface", tokenizer_digest=one.digest, vocab_size=3, eod_id=0, max_token_id=2,
        documents=1, tokens=2, dtype="uint16", bad_lines=0, sources=(),
    )  # fmt: skip
    (tmp_path / "books.json").write_bytes(described.to_json())
    refuse_other_tokenizer(one, str(run))
    with pytest.raises(DataError, match=r"is of a run on .*books, which was made with another tokenizer"):
        refuse_other_tokenizer(other, str(run))


@pytest.mark.parametrize("text", ["[model", "data = 1\n", "[model]\nlayers = 3\n", "[model]\nnum_layers = 'x'\n", "\0"])
def test_a_config_that_no_training_wrote_is_refused_where_it_is_of_the_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.toml is damaged, or not written by a training: .* Copy it"):
        read_run(tmp_path)


def test_a_config_of_something_else_above_a_checkpoint_is_not_its_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "models/imported/iter_0000000"
    checkpoint.mkdir(parents=True)
    (tmp_path / "config.toml").touch()
    assert run_of_checkpoint(checkpoint) is None
    (tmp_path / "models/imported/config.toml").touch()
    assert run_of_checkpoint(checkpoint) == tmp_path / "models/imported"
    (tmp_path / "checkpoints").mkdir()
    assert run_of_checkpoint(tmp_path / "checkpoints/kept/iter_0000000") == tmp_path


def test_an_evaluation_takes_the_adapters_of_the_checkpoint_where_the_config_goes_with_them(tmp_path: Path) -> None:
    checkpoint = tmp_path / "iter_0000001"
    checkpoint.mkdir()
    settings = {"lora": {"rank": 8, "alpha": 4.0, "targets": ["attention"]}}
    marker = Marker(step=1, time="", world_size=1, mesh={}, model={}, megatron="", files={}, settings=settings)
    write_marker(checkpoint, marker)
    plain = load_config(RewardModelConfig, None, [])
    adapted = with_stored_adapters(plain, tmp_path)
    assert adapted.lora == LoraConfig(rank=8, alpha=4.0, targets=("attention",)) and not adapted.allows_te
    own = plain.model_copy(update={"lora": LoraConfig(rank=2)})
    assert with_stored_adapters(own, tmp_path) is own
    te = load_config(RewardModelConfig, None, ["platform.layers=te"])
    with pytest.raises(ConfigError, match=r'lora\.rank=8 with platform\.layers="te"'):
        with_stored_adapters(te, tmp_path)
    write_marker(checkpoint, replace(marker, settings={}))
    assert with_stored_adapters(plain, tmp_path) is plain
