"""An export is a complete Hugging Face folder: transformers makes text from text with it alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from mcore_rl.cli.cli import main
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.documents import DocumentFormat
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer
from mcore_rl.errors import CheckpointError
from tests.conversion import exported, imported, saved
from tests.hf_models import CASES, oracle, random_tokens
from tests.unit.convert.conftest import Converted

VOCAB = 420
TEXTS = ["Größe 12: two  spaces,\n\ttabs\n", "def f(x): return x", "漢字 🙂 <s> it is", ""]
OPEN = """
import json, sys
from transformers import AutoTokenizer, pipeline
texts, found, greedy = json.loads(sys.argv[1]), {}, {"do_sample": False, "max_new_tokens": 12}
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generate = pipeline("text-generation", model=folder, device="cpu")
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    template = tokenizer.chat_template and tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    found[folder] = {
        "size": len(tokenizer),
        "ids": ids,
        "again": [tokenizer.decode(found, skip_special_tokens=False) for found in ids],
        "eos": tokenizer.eos_token,
        "ends": generate.model.generation_config.eos_token_id,
        "template": template,
        "text": generate("def f", **greedy)[0]["generated_text"],
        "tokens": generate("def f", return_tensors=True, **greedy)[0]["generated_token_ids"],
    }
print(json.dumps(found))
"""


def opened(*folders: Path) -> list[dict[str, Any]]:
    """What transformers, in a program without this package, makes of the folders."""
    command = [sys.executable, "-c", OPEN, json.dumps(TEXTS), *map(str, folders)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [found[str(folder)] for folder in folders]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spm")
    shutil.copy(Path(__file__), folder / "text.txt")
    options = TokenizerTraining(
        inputs=(folder / "text.txt",),
        output=folder / "tok.model",
        document_format=DocumentFormat(kind="text"),
        vocab_size=VOCAB,
    )
    train_tokenizer(options)
    return options.output


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer whose template ends turns with a token that is not its eos."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner.train_from_iterator(
        [Path(__file__).read_text()],
        tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet),
    )
    folder = tmp_path_factory.mktemp("chat")
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    return folder


def run_of(folder: Path, case: str, tokenizer: str, data: str = "") -> Path:
    """The folder of a run of a tiny model, as a training leaves it."""
    checkpoint = imported(saved(case, folder / "hf", vocab_size=VOCAB), folder / "ckpt")
    run = folder / "my_run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint.rename(run / "checkpoints" / checkpoint.name)
    (run / "config.toml").write_text(f"[data]\n{data}\n[data.tokenizer]\n{tokenizer}\n")
    machine = {"device": "cpu", "ranks": 1, "cores": 2, "memory_bytes": 2**30}
    attempt = {"started": "2026-01-31T12:00:00+00:00", "step": 0, "command": ["mcore-rl", "pretrain"]}
    attempt |= {"commit": "0123abc", "versions": {"torch": "2.9"}, "machine": machine, "mesh": {"tp": 2}}
    (run / "run.json").write_text(json.dumps([attempt]))
    records = [{"step": 0, "eval/loss_nats": 5.25, "moe/drop": 1.0}, {"step": 9, "eval/loss_nats": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def continued(case: str, ids: list[int], stop: int) -> list[int]:
    """`ids` and twelve tokens more, or up to `stop`, each the likeliest of transformers' model."""
    theirs, found = oracle(case, vocab_size=VOCAB), list(ids)
    while len(found) < len(ids) + 12 and found[-1] != stop:
        found.append(int(theirs.logits(torch.tensor([found]))[0, -1].argmax()))
    return found


@pytest.mark.full
def test_transformers_makes_text_of_text_with_an_export(
    tmp_path: Path, sentencepiece_model: Path, chat_folder: Path
) -> None:
    plain = run_of(tmp_path / "a", "llama", f'kind = "sentencepiece"\npath = "{sentencepiece_model}"')
    words = f'kind = "huggingface"\npath = "{chat_folder}"'
    chat = run_of(tmp_path / "b", "qwen3_moe", words, 'chat_template = "tokenizer"')
    folders = [tmp_path / "out_a", tmp_path / "out_b"]
    for run, out in zip((plain, chat), folders, strict=True):
        assert main(["convert", "export", str(run), str(out), "--workers", "1"]) == 0
    first, second = opened(*folders)

    ours = load_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(sentencepiece_model)))
    assert first["size"] == VOCAB and first["ends"] == ours.eod_id and first["eos"] == "</s>"
    # transformers reads the name of a control token in a text as that token, sentencepiece as text.
    without_names = [index for index, text in enumerate(TEXTS) if "<s>" not in text]
    assert [first["ids"][index] for index in without_names] == [ours.encode(TEXTS[index]) for index in without_names]
    assert first["again"] == second["again"] == TEXTS
    assert first["tokens"] == continued("llama", ours.encode("def f"), ours.eod_id)
    assert first["text"].startswith("def f") and len(first["text"]) > len("def f")

    theirs = tokenizers.Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    start = theirs.encode("def f", add_special_tokens=False).ids
    end = theirs.token_to_id("<|im_end|>")
    assert set(second["ends"]) == {end, theirs.token_to_id("<|endoftext|>")}
    assert second["template"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert second["tokens"] == continued("qwen3_moe", start, end)
    assert second["text"] == theirs.decode(second["tokens"])
    assert (folders[1] / "additional_chat_templates" / "tools.jinja").is_file()


def test_an_export_has_the_chat_templates_of_its_run_and_none_of_its_reference(
    tmp_path: Path, chat_folder: Path
) -> None:
    mine, reference, tool_use = tmp_path / "mine", tmp_path / "hf", "additional_chat_templates/tool_use.jinja"
    shutil.copytree(chat_folder, mine)
    (mine / tool_use).write_text("{{ tools }}")
    run = run_of(tmp_path, "llama", f'kind = "huggingface"\npath = "{mine}"', 'chat_template = "plain"')
    shutil.copytree(mine, reference, dirs_exist_ok=True)
    command = ["convert", "export", str(run), "--reference", str(reference), "--workers", "1"]
    asked, tools = [{"role": "user", "content": "a"}], [{"function": {"name": "add"}}]
    shown = []
    for out in (tmp_path / "one", tmp_path / "two"):
        assert main([*command[:3], str(out), *command[3:]]) == 0
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        shown.append(theirs.apply_chat_template(asked, tools=tools, tokenize=False))
        if out.name == "two":
            break
        # Next, the tokenizer's own template, as an entry of its settings.
        settings = json.loads((mine / "tokenizer_config.json").read_text())
        shutil.rmtree(mine / "additional_chat_templates")
        (mine / "chat_template.jinja").unlink()
        (mine / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "own {{ tools }}"}))
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(config.replace('"plain"', '"tokenizer"'))
    assert shown == ["user:\na\n\n", f"own {tools}"]


def test_the_model_card_names_run_commit_and_metrics_of_the_step(tmp_path: Path, sentencepiece_model: Path) -> None:
    data = f'kind = "sentencepiece"\npath = "{sentencepiece_model}"'
    run = run_of(tmp_path, "llama", data, 'chat_template = "plain"')
    assert main(["convert", "export", str(run), str(tmp_path / "out"), "--workers", "1"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    rows = ("# my_run", "| commit | 0123abc |", "| command | mcore-rl pretrain |", "| eval/loss_nats | 5.25 | 0 |")
    assert set(rows) <= set(card.splitlines()) and "moe/drop" not in card, card
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    render = transformers.utils.chat_template_utils.render_jinja_template
    rendered, _ = render([turns], chat_template=template, add_generation_prompt=True, eos_token="</s>")
    assert rendered == ["user:\na\n\nassistant:\nb</s>assistant:\n"]


@pytest.mark.full
def test_an_export_without_a_tokenizer_is_refused_unless_it_is_wanted(
    tmp_path: Path, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved("llama", tmp_path / "hf", vocab_size=VOCAB)
    checkpoint = str(imported(source, tmp_path / "ckpt"))
    out = str(tmp_path / "out")
    (source / "tokenizer.json").unlink()
    assert main(["convert", "export", checkpoint, out, "--reference", str(source)]) == 2
    assert "names no tokenizer" in capsys.readouterr().err
    assert main(["convert", "export", checkpoint, out, "--tokenizer", "none"]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert main(["convert", "export", checkpoint, out, "--tokenizer", str(chat_folder), "--overwrite"]) == 0
    assert transformers.AutoTokenizer.from_pretrained(out)("hello").input_ids
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 0 and config["bos_token_id"] is None


@pytest.mark.full
def test_a_reference_with_another_tokenizer_than_the_runs_is_refused(
    tmp_path: Path, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, "llama", f'kind = "huggingface"\npath = "{chat_folder}"')
    arguments = ["convert", "export", str(run), str(tmp_path / "out"), "--reference", str(tmp_path / "hf")]
    assert main(arguments) == 2
    assert "has another tokenizer than" in capsys.readouterr().err
    assert main([*arguments, "--tokenizer", str(chat_folder)]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (chat_folder / "tokenizer.json").read_bytes()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    # Its chat template, which the output has, ends a turn with <|im_end|>.
    assert generation == {"eos_token_id": [2, 0], "temperature": 0.6}


@pytest.mark.full
def test_a_reference_with_another_tokenizer_than_the_imports_is_refused(
    tmp_path: Path, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved("llama", tmp_path / "hf", vocab_size=VOCAB)
    checkpoint = imported(source, tmp_path / "ckpt")
    arguments = ["convert", "export", str(checkpoint), str(tmp_path / "out"), "--reference", str(source)]
    (source / "tokenizer.json").write_bytes((chat_folder / "tokenizer.json").read_bytes())
    assert main(arguments) == 2
    assert f"has another tokenizer than {checkpoint}, that of the model" in capsys.readouterr().err
    assert main([*arguments, "--tokenizer", str(source)]) == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json", "manifest.json"])
def test_a_small_file_of_an_import_that_has_changed_is_not_exported(name: str, tmp_path: Path) -> None:
    """A file of another length is refused by every reader of the checkpoint; here the length is the same."""
    checkpoint = imported(saved("llama", tmp_path / "hf"), tmp_path / "ckpt")
    content = bytearray((checkpoint / name).read_bytes())
    content[content.index(b":")] ^= 1
    (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is not the file that was written"):
        exported(checkpoint, tmp_path / "out")


AWKWARD = {"vocab_size": 1003}


@pytest.mark.full
def test_transformers_opens_exports_without_reference(converted: Converted, tmp_path: Path) -> None:
    """With its own classes: this package registers none. Two are opened without this package above."""
    tokens_BS = random_tokens(length=16)
    for case in CASES:
        folder = exported(converted(case, **AWKWARD)[1], tmp_path / case)
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            logits_BSV = opened(tokens_BS).logits
        torch.testing.assert_close(logits_BSV, oracle(case, **AWKWARD).logits(tokens_BS), rtol=0, atol=1e-6, msg=case)


@pytest.mark.full
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_a_model_opens_in_the_type_of_its_weights_whatever_the_reference_has(
    case: str, key: str, converted: Converted, tmp_path: Path
) -> None:
    source, checkpoint = converted(case, **AWKWARD)
    tokens_BS = random_tokens(length=16)
    for written, named in (("fp32", "bfloat16"), ("bf16", "float16")):
        reference = saved(case, tmp_path / f"reference_{written}", **AWKWARD)
        config = {name: value for name, value in oracle(case, **AWKWARD).config.items() if name != "dtype"}
        (reference / "config.json").write_text(json.dumps(config | {key: named}))
        folder = exported(checkpoint, tmp_path / written, reference=reference, dtype=written)
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype="auto"
        ).eval()
        assert opened.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[written]
        if written == "fp32":
            with torch.no_grad():
                logits_BSV = opened(tokens_BS).logits
            torch.testing.assert_close(logits_BSV, oracle(case, **AWKWARD).logits(tokens_BS), rtol=0, atol=1e-6)
        assert json.loads((folder / "config.json").read_text()).keys() == (config | {key: named}).keys()
    same = exported(checkpoint, tmp_path / "same", reference=source)
    assert (same / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.full
def test_nothing_of_a_quantized_reference_says_that_the_weights_are_quantized(tmp_path: Path) -> None:
    reference = saved("llama", tmp_path / "hf")
    checkpoint = imported(reference, tmp_path / "ckpt")
    keys = ("quantization_config", "compression_config", "quantization")
    quantized = {key: {"quant_method": "compressed-tensors", "bits": 4} for key in keys}
    (reference / "config.json").write_text(json.dumps(oracle("llama").config | quantized))
    files = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
    for name in files:
        (reference / name).write_text("{}")
    (reference / "notes.json").write_text("{}")
    folder = exported(checkpoint, tmp_path / "out", reference=reference)
    assert json.loads((folder / "config.json").read_text()) == oracle("llama").config
    missing = {file.name for file in reference.iterdir()} - {file.name for file in folder.iterdir()}
    assert missing == {*files, *(file.name for file in reference.glob("model*"))}
