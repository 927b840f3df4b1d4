"""Folders with the files that each family's models are published with: imported, and exported beside them."""

import json
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.storage.checkpoint import MANIFEST
from tests.conversion import imported, saved
from tests.tiktoken_folders import write_tokenizer

CODE = "configuration_deepseek.py modeling_deepseek.py"
TOKENIZER = "tokenizer.json tokenizer_config.json"
QWEN = f"LICENSE merges.txt vocab.json {TOKENIZER}"
PUBLISHED = {
    "Meta-Llama-3.1-8B": ("llama", f"LICENSE USE_POLICY.md special_tokens_map.json {TOKENIZER}"),
    "Mixtral-8x7B-v0.1": ("mixtral", f"special_tokens_map.json tokenizer.model {TOKENIZER}"),
    "Qwen2.5-7B": ("qwen2", QWEN),
    "Qwen2-57B-A14B": ("qwen2_moe", QWEN),
    "Qwen3-4B": ("qwen3", QWEN),
    "Qwen3-30B-A3B": ("qwen3_moe", QWEN),
    "OLMoE-1B-7B-0924": ("olmoe", f"special_tokens_map.json {TOKENIZER}"),
    "DeepSeek-V2": ("deepseek_v2", f"{CODE} LICENSE tokenization_deepseek_fast.py {TOKENIZER}"),
    "DeepSeek-V3": ("deepseek_v3", f"{CODE} LICENSE-MODEL {TOKENIZER}"),
    "Moonlight-16B-A3B": (
        "deepseek_v3-full-queries",
        f"{CODE} tiktoken.model tokenization_moonshot.py tokenizer_config.json",
    ),
    "Kimi-K2-Instruct": (
        "deepseek_v3",
        f"{CODE} LICENSE chat_template.jinja tiktoken.model tokenization_kimi.py tokenizer_config.json "
        "tool_declaration_ts.py",
    ),
    "GLM-4.5-Air": ("glm4_moe", f"chat_template.jinja {TOKENIZER}"),
    "gpt-oss-20b": ("gpt_oss", f"LICENSE USAGE_POLICY chat_template.jinja special_tokens_map.json {TOKENIZER}"),
}
"""Case of tests/hf_models.py, and the small files besides config.json, generation_config.json and README.md."""
VOCAB = 656


def published(name: str, folder: Path) -> Path:
    """A small model with the names of a published one's files."""
    case, files = PUBLISHED[name][0], PUBLISHED[name][1].split()
    saved(case, folder, vocab_size=VOCAB)
    (folder / "tokenizer.json").unlink()
    for file in files:
        text = f"{file} of {name}"
        (folder / file).write_text(json.dumps(text) if file.endswith(".json") else text)
    (folder / "README.md").write_text("the card of the original")
    (folder / "figures").mkdir()
    (folder / "figures" / "banner.txt").write_text("no file of the model")
    code = [file for file in files if file.startswith(("tokenization_moonshot", "tokenization_kimi"))]
    if code:
        write_tokenizer(folder, Path(code[0]).stem)
    return folder


@pytest.mark.matrix("DeepSeek-V2")
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_export_has_every_small_file_of_the_published_folder(name: str, tmp_path: Path) -> None:
    source, out = published(name, tmp_path / name), tmp_path / "out"
    arguments = ["--workers", "1", "--no-check-logits"]
    assert main(["convert", "import", str(source), str(tmp_path / "ckpt"), *arguments]) == 0
    assert main(["convert", "export", str(tmp_path / "ckpt"), str(out), "--reference", str(source)]) == 0
    kept = {*PUBLISHED[name][1].split(), "config.json", "generation_config.json"}
    weights = {"model.safetensors", MANIFEST}
    assert {file.name for file in out.iterdir()} == kept | weights | {"README.md"}
    assert {file: (out / file).read_bytes() for file in kept} == {file: (source / file).read_bytes() for file in kept}
    assert "exported by mcore_rl" in (out / "README.md").read_text()


@pytest.mark.full
@pytest.mark.parametrize("name", ["Moonlight-16B-A3B", "Kimi-K2-Instruct"])
def test_the_tokenizer_of_a_run_is_a_tiktoken_model_with_its_code(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = published(name, tmp_path / "hf"), tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint = imported(source, tmp_path / "ckpt")
    checkpoint.rename(run / "checkpoints" / checkpoint.name)
    (run / "config.toml").write_text(f'[data.tokenizer]\nkind = "huggingface"\npath = "{source}"\n')
    assert main(["convert", "export", str(run), str(tmp_path / "out")]) == 0
    files = {file for file in PUBLISHED[name][1].split() if file.startswith(("tiktoken", "token", "tool_", "chat_"))}
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [400, 402, 655]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    # The end of a turn is what the files call the end; [EOS] ends a document.
    assert generation["eos_token_id"] == [402, 401]

    other = published(name, tmp_path / "other")
    capsys.readouterr()
    with_other = ["convert", "export", str(run), str(tmp_path / "second"), "--reference", str(other)]
    assert main(with_other) == 0
    write_tokenizer(other, "tokenization_kimi", num_tokens=390)
    assert main([*with_other, "--overwrite"]) == 2
    assert "has another tokenizer than" in capsys.readouterr().err
