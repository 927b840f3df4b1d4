"""The Python API: configs from names, files and mappings; metrics; errors before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.api import ConfigError, DataError, is_done, load_config, read_metrics, train, train_tokenizer
from mcore_rl.config.load import load_config as load_config_file
from mcore_rl.config.run import PretrainConfig

ROOT = Path(__file__).parents[2]


def test_a_recipe_a_file_and_a_mapping_are_one_config() -> None:
    file = ROOT / "launch/recipes/tiny_moe/pretrain.toml"
    wanted = load_config_file(PretrainConfig, file, ["mesh.tp=1", "mesh.ep=4", "run_dir=elsewhere"])
    overrides = {"mesh.tp": 1, "mesh": {"ep": 4}, "run_dir": Path("elsewhere")}
    assert load_config("pretrain", "tiny_moe/pretrain", overrides) == wanted
    assert load_config("pretrain", file, overrides) == wanted
    assert load_config("pretrain", wanted.model_dump(mode="json")) == wanted
    assert load_config("pretrain", {"train": {"eval_batches": None}}).train.eval_batches is None


def test_errors_of_a_config_come_before_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"Did you mean mesh\.tp"):
        load_config("rl", "tiny_moe/grpo", {"mesh.tpp": 2})
    with pytest.raises(ConfigError, match=r"There is no program 'grpo'\. Name one of pretrain, sft, rm, dpo, rl"):
        load_config("grpo", "tiny_moe/grpo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="The world has 3 ranks"):
        train("pretrain", "tiny_moe/pretrain", {"run_dir": tmp_path / "run"}, ranks=3)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a launcher has started the ranks"):
        train("pretrain", "tiny_moe/pretrain", ranks=2)
    with pytest.raises(ConfigError, match=r"Name a class of your own in log\.sinks"):
        train("pretrain", "tiny_moe/pretrain", on_step=print)


def test_records_that_cannot_be_trained_on_are_refused(tmp_path: Path) -> None:
    fields = {"run_dir": tmp_path / "run"}
    with pytest.raises(ConfigError, match="call preprocess"):
        train("pretrain", "tiny_moe/pretrain", fields, data=[{"text": "a"}])
    with pytest.raises(ConfigError, match=r"no mapping of JSON's types: .*set"):
        train("sft", "tiny_moe/sft", fields, data=[{"prompt": {1, 2}}])
    with pytest.raises(ConfigError, match=r"no mapping of JSON's types: .*surrogates not allowed"):
        train("sft", "tiny_moe/sft", fields, data=[{"prompt": "\ud800", "response": "b"}])
    assert not (tmp_path / "run").exists()
    # A start that was refused, here for the model that the recipe starts from, may be given other records.
    for text in ("x", "é"):
        with pytest.raises(ConfigError, match=r"checkpoint\.load"):
            train("sft", "tiny_moe/sft", fields, data=iter([{"prompt": text, "response": "b"}]))
        assert not (tmp_path / "run/data.jsonl").exists()
    # No other file is replaced or deleted, be it of a run that has not made a step yet, or of none.
    written = '{"prompt": "é", "response": "b"}\n'
    (tmp_path / "run/data.jsonl").write_text(written)
    with pytest.raises(ConfigError, match=r"checkpoint\.load"):
        train("sft", "tiny_moe/sft", fields, data=[{"prompt": "é", "response": "b"}])
    with pytest.raises(ConfigError, match=r"data\.jsonl does not have the records of data"):
        train("rl", "tiny_moe/grpo", fields, data=[{"prompt": "c", "answer": "d"}])
    assert (tmp_path / "run/data.jsonl").read_text() == written
    (tmp_path / "run/data.jsonl").unlink()
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="a run has begun with others"):
        train("sft", "tiny_moe/sft", fields, data=[{"prompt": "é", "response": "b"}])
    assert not (tmp_path / "run/data.jsonl").exists()


def test_messages_name_parameters_and_not_options(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a text"}\n')
    with pytest.raises(DataError, match=r"Look at key and format\.") as refused:
        train_tokenizer([tmp_path / "a.jsonl"], tmp_path / "t.model", vocab_size=300)
    assert "--" not in str(refused.value)
    with pytest.raises(DataError, match=r"vocab_size 300 is more than these 1 lines of text yield"):
        train_tokenizer([tmp_path / "a.jsonl"], tmp_path / "t.model", vocab_size=300, key="body")


def test_metrics_are_by_name_and_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "train/loss_nats": 5.5, "moe/expert_load": [[1, 2]]}\n'
        '{"step": 1, "time": 2.0, "event": "checkpoint saved"}\n'
        '{"step": 2, "time": 3.0, "train/loss_nats": "inf"}\n'
        '{"step": 3, "ti'
    )
    metrics = read_metrics(tmp_path)
    assert metrics == {"train/loss_nats": {1: 5.5, 2: float("inf")}, "moe/expert_load": {1: [[1, 2]]}}
    with pytest.raises(DataError, match="is not there"):
        read_metrics(tmp_path / "none")


def test_a_run_is_done_when_its_folder_says_so(tmp_path: Path) -> None:
    assert not is_done(tmp_path)
    (tmp_path / "DONE").touch()
    assert is_done(tmp_path)


@pytest.mark.full
def test_the_api_imports_no_megatron() -> None:
    code = "import sys, mcore_rl.api; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
