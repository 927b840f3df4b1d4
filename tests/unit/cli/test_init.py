"""`mcore-rl init` and whether a training of a model fits: from its folder."""

import json
import re
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.cli import run
from mcore_rl.cli.init import size_of
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import parse_gpus
from mcore_rl.storage.run_config import load_run_config
from tests.conversion import saved

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    folder = tmp_path / "my models" / "Qwen3-30B-A3B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return folder


def test_a_tokenizer_without_a_chat_template_gets_the_plain_one(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (qwen / "tokenizer.json").write_text("{}")
    assert run(["init", str(qwen)]) == 0 and 'data.chat_template = "plain"' in capsys.readouterr().out
    (qwen / "chat_template.jinja").write_text("{{ messages }}")
    assert run(["init", str(qwen)]) == 0 and "data.chat_template" not in capsys.readouterr().out


@pytest.mark.full
def test_the_answer_is_one_line_and_its_command_passes_the_checks(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(qwen), "--gpus", "8xH100"]) == 0
    answer, *rest = capsys.readouterr().out.splitlines()
    assert answer.startswith("yes: sft fits on 8 x H100 with ") and len(answer) <= 100
    details = next(i for i, line in enumerate(rest) if not line.endswith("\\")) + 1
    # The card of the model: 30.5 B parameters, 3.3 B activated. A batch has as many sequences as ranks.
    described = " ".join(rest[details : rest.index("")])
    assert described.startswith("Qwen3-30B-A3B, 30.5 B parameters, 3.35 B at work for a token: sft in bf16 with ")
    assert re.search(r", [\d.]+ s for a batch of 8 sequences\.$", described) and max(map(len, rest[details:])) <= 100
    free, room = map(float, re.findall(r"([\d.]+) of ([\d.]+) GiB free", answer)[0])
    assert room == pytest.approx(80 - 6, abs=0.2) and room - free > 16 * 30.5 / 8 * 0.9
    fields = shlex.split("\n".join(rest[:details]))[3:]
    assert fields[0] == f"model.path={qwen}"
    data = ["data.train=x", "data.tokenizer.kind=huggingface", f"data.tokenizer.path={qwen}"]
    config = load_run_config(PROGRAMS["sft"].config, None, [*fields, *data])
    PROGRAMS["sft"].check(config, 8)
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"^sft does not fit on 2 x H100\. It fits on [48] x H100\."):
        run(["plan", str(qwen), "--gpus", "2xH100"])
    assert capsys.readouterr().out == "no: sft does not fit on 2 x H100\n"
    # What is refused whatever the mesh is said as it is.
    with pytest.raises(ConfigError, match=r"(?s)data\.seq_length=100000 .*model\.max_position"):
        run(["plan", str(qwen), "data.seq_length=100000", "--gpus", "8xH100"])


@pytest.mark.full
def test_a_model_of_the_hub_is_asked_about_by_its_name(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-30B-A3B/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    (tmp_path / "hub/models--Qwen--Qwen3-30B-A3B/refs").mkdir()
    (tmp_path / "hub/models--Qwen--Qwen3-30B-A3B/refs/main").write_text("0123abcd")
    assert run(["plan", str(qwen), "--gpus", "8xH100"]) == 0
    by_folder = capsys.readouterr().out
    assert run(["plan", "Qwen/Qwen3-30B-A3B", "--gpus", "8xH100"]) == 0
    # The folder's path has a blank, for which the shell's word is quoted.
    named = by_folder.replace(f"'model.path={qwen}'", "model.path=Qwen/Qwen3-30B-A3B")
    assert named != by_folder and capsys.readouterr().out == named
    with pytest.raises(
        ConfigError, match=r"(?s)no file Qwen/Other, and no recipe .*`hf\s+download\s+Qwen/Other\s+config\.json`"
    ):
        run(["plan", "Qwen/Other", "--gpus", "8xH100"])


def test_adapters_fit_on_fewer_gpus_and_the_command_has_them(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(qwen), "--gpus", "1xH100", "--lora-rank", "16"]) == 0
    answer, *lines = capsys.readouterr().out.splitlines()
    free, room = map(float, re.findall(r"([\d.]+) of ([\d.]+) GiB free", answer)[0])
    # All 30.5 B weights in 16 bits lie on the GPU.
    assert answer.startswith("yes: sft fits") and room - free > 2 * 30.5e9 / 2**30
    assert next(line for line in lines if not line.endswith("\\")).strip() == "lora.rank=16"


def test_the_size_is_that_of_the_weights(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "model")
    total = 0
    for file in folder.glob("*.safetensors"):
        total += sum(tensor.numel() for tensor in load_file(file).values())
    config = load_run_config(PROGRAMS["pretrain"].config, None, [f"model.path={folder}", "model.vocab_multiple=1"])
    assert size_of(config.model).startswith(f"{total / 1e9:.3g} B parameters")


@pytest.mark.matrix("none-pretrain", "none-sft", "none-dpo", "8xH100-rl")
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("gpus", ["8xH100", "none"])
def test_a_config_is_written_that_passes_all_checks(
    qwen: Path, kind: str, gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (qwen / "tokenizer.json").write_text("{}")
    assert run(["init", str(qwen), "--program", kind, *(() if gpus == "none" else ("--gpus", gpus))]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "my.toml"
    file.write_text(text)
    ranks = 1 if gpus == "none" else 8
    assert f"mcore-rl {kind} THIS_FILE --ranks {ranks}" in text.splitlines()[0] and len(text.splitlines()) < 30
    config, _ = PROGRAMS[kind].checked_config(file, [], ranks)
    assert config.model.num_layers == 48 and config.platform.precision == ("fp32" if ranks == 1 else "bf16")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8", "wanted a number and a kind of GPU, as 8xH100"),
        ("0xH100", "wanted a number"),
        ("12xH100", "more than 8 GPUs are nodes of 8"),
        ("8xH10O", 'gpus="H10O" is no known device. Did you mean H100'),
    ],
)
def test_gpus_that_are_none_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_gpus(text)


def test_a_config_is_planned_on_gpus_without_a_clusters_file(capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*words: str) -> list[str]:
        assert run(["plan", "qwen3_30b_a3b/pretrain", *words]) == 0
        return capsys.readouterr().out.splitlines()

    # The example's nodes have a little less memory than the data sheet.
    planned, of_cluster = lines("--gpus", "32xH100"), lines("--cluster", "example_h100", "--nodes", "4")
    assert "of 74.0 GiB free on each GPU" in planned[0] and "of 73.6 GiB free on each GPU" in of_cluster[0]
    assert [line.replace("74.0 GiB", "73.6 GiB") for line in planned[1:]] == of_cluster[1:]
    with pytest.raises(ConfigError, match="--gpus names all GPUs"):
        lines("--gpus", "8xH100", "--nodes", "4")
    with pytest.raises(ConfigError, match=r"is a model:\s+`mcore-rl plan"):
        run(["plan", "/tmp", "--cluster", "example_h100", "--nodes", "1"])


def test_a_data_file_is_split_and_the_config_names_only_files_that_are_there(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (qwen / "tokenizer.json").write_text("{}")
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f'{{"question": "{i}", "answer": "{i}"}}\n' for i in range(100)))
    assert run(["init", str(qwen), "--program", "rl", "--data", str(data), "--reward", "math", "--gpus", "8xH100"]) == 0
    file = tmp_path / "my.toml"
    file.write_text(capsys.readouterr().out)
    config = load_run_config(RlRunConfig, file)
    (trained,), (held_out,) = config.rl.prompts.files, config.rl.eval.files
    lines = [Path(name).read_text().splitlines() for name in (trained, held_out)]
    assert [len(part) for part in lines] == [95, 5] and json.loads(lines[1][0])["question"] == "19"
    assert sorted(lines[0] + lines[1]) == sorted(data.read_text().splitlines())
    assert config.rl.reward.parts == ("math",)
    PROGRAMS["rl"].check(config, 8)
    data.write_text('{"question": "1", "answer": "1"}\n')
    assert run(["init", str(qwen), "--program", "rl", "--data", str(data), "--gpus", "8xH100"]) == 0
    assert "rl.eval.files" not in capsys.readouterr().out
