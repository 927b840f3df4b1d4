"""`mcore-rl generate` on a random model and a real tokenizer."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from mcore_rl.cli.cli import main
from mcore_rl.cli.generate import Request, request_of
from mcore_rl.config.data import DataConfig, TokenizerConfig
from mcore_rl.config.load import dump_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.data.documents import DocumentFormat
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer
from mcore_rl.errors import escaped
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.model.build import build_model
from mcore_rl.storage.checkpoints.write import load_weights, save_weights
from mcore_rl.storage.folders import ModelFolder
from tests.fake_server import FakeServer, TableAnswers
from tests.served_model import ModelAnswers

TEXT = "the cat sat on the mat and the dog sat on the cat while nobody looked at 1984 letters "
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=300,
    max_position=64,
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16),
)


def sentencepiece_of(path: Path) -> Tokenizer:
    return load_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(path)))


def built() -> tuple[Mesh, list[nn.Module]]:
    platform, mesh = platforms.start(PlatformConfig()), build_mesh(MeshConfig())
    seed_ranks(1)
    return mesh, build_model(MODEL, mesh, platform, PlatformConfig())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a config and a checkpoint of random weights, as large as they must be for texts to differ."""
    folder = tmp_path_factory.mktemp("run")
    sample = folder / "sample.jsonl"
    sample.write_text(json.dumps({"text": TEXT * 20}) + "\n")
    path = folder / "tokens.model"
    train_tokenizer(
        TokenizerTraining(inputs=(sample,), output=path, document_format=DocumentFormat(kind="jsonl"), vocab_size=300)
    )
    tokenizer = TokenizerConfig(kind="sentencepiece", path=str(path))
    config = PretrainConfig(model=MODEL, data=DataConfig(tokenizer=tokenizer))
    (folder / "config.toml").write_text(dump_config(config))
    mesh, chunks = built()
    with torch.no_grad():
        for param in chunks[0].parameters():
            param.copy_(torch.randn(param.shape) * 0.3)
    save_weights(chunks, mesh, MODEL, folder / "checkpoints")
    destroy_mesh()
    platforms.stop()
    return folder


@pytest.fixture(autouse=True)
def no_mesh_left() -> Iterator[None]:
    yield
    destroy_mesh()
    platforms.stop()


def generate(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["generate", *map(str, words)]) == 0
    destroy_mesh()
    return capsys.readouterr().out


@pytest.mark.full
def test_streamed_it_is_the_same_text_in_pieces(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(*words: str) -> list[str]:
        file_slices: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout.write", file_slices.append)
            status = main(["generate", "--run", str(run_dir), "--prompt", "the cat", "--tokens", "24", *words])
        destroy_mesh()
        assert status == 0
        return file_slices

    streamed = written("--stream")
    assert "".join(streamed) == "".join(written())
    assert len(streamed) > 3, "it came at once"


def test_folder_and_text_need_no_names(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = generate(capsys, "--model", run_dir, "--prompt", "the cat", "--tokens", 12)
    assert generate(capsys, run_dir, "the cat", "--tokens", 12) == named
    assert generate(capsys, "--tokens", 12, run_dir, "--prompt", "the cat") == named
    for option in ("--model", "--run"):
        assert generate(capsys, option, run_dir, "the cat", "--tokens", 12) == named


def test_it_writes_the_likeliest_continuation(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(capsys, "--run", run_dir, "--prompt", "the cat", "--tokens", 12)
    tokenizer = sentencepiece_of(run_dir / "tokens.model")
    mesh, (chunk,) = built()
    load_weights([chunk.eval()], mesh, MODEL, run_dir)
    tokens = tokenizer.encode("the cat")
    with torch.no_grad():
        for _ in range(12):
            inputs_1S, places_1S = torch.tensor([tokens]), torch.arange(len(tokens))[None]
            logits_V = chunk(input_ids=inputs_1S, position_ids=places_1S, attention_mask=None)[0, -1]
            tokens.append(int(logits_V[:300].argmax()))
            if tokens[-1] == tokenizer.eod_id:
                break
    platforms.stop()
    assert text == tokenizer.decode([token for token in tokens if token != tokenizer.eod_id]) + "\n"


def test_a_continuation_keeps_the_space_of_its_first_piece_and_has_no_end_token(tmp_path: Path) -> None:
    """As in Llama's tokenizer, the library puts a space before a text, and takes it off the decoded one."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20), model_prefix=str(tmp_path / "t"), vocab_size=60, hard_vocab_limit=False
    )
    tokenizer = sentencepiece_of(tmp_path / "t.model")
    assert tokenizer.decode(tokenizer.encode("sat")) == "sat"

    def request(*, is_whole: bool) -> Request:
        prompt_T, ends = tuple(tokenizer.encode("the cat")), frozenset([tokenizer.eod_id])
        return Request(tokenizer=tokenizer, prompt_T=prompt_T, shown="the cat", is_whole=is_whole, ends=ends)

    said = [*tokenizer.encode("sat on the mat"), tokenizer.eod_id]
    assert request(is_whole=False).text_of(said) == " sat on the mat"
    assert request(is_whole=True).text_of(said) == "sat on the mat"


@pytest.mark.full
def test_seeds_number_the_continuations(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", run_dir / "checkpoints" / "iter_0000000", "--temperature", 0.9, "--tokens", 9]
    parts = generate(capsys, *words, "--n", 3, "--seed", 5).split("--- ")[1:]
    assert [part.split("\n")[0] for part in parts] == ["1 of 3", "2 of 3", "3 of 3"]
    texts = [part.split("\n", 1)[1] for part in parts]
    assert len(set(texts)) == 3
    assert [generate(capsys, *words, "--seed", seed) for seed in (5, 6, 7)] == texts


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give FOLDER"),
        (["--run", "RUN", "--n", "2"], "at temperature 0 is 2 times the same text"),
        (["--run", "RUN", "--temperature", "inf"], "--temperature inf, wanted 0 (always the likeliest token)"),
        (["--run", "RUN", "--temperature", "1e-300"], "--temperature 1e-300, wanted 0"),
        (["--run", "RUN", "--top-p", "0"], "--top-p 0.0, wanted above 0"),
        (["--run", "RUN", "--stream", "--n", "2"], "--stream shows one text"),
        (["--run", "RUN", "--top-k", "-1"], "--top-k -1, wanted 0"),
        (["--run", "RUN", "--tokens", "100"], "the engine holds 64"),
        (["--run", "RUN", "--chat"], "--chat answers a prompt"),
        (["--run", "RUN", "--chat", "--prompt", "?"], "a .model file has no chat template"),
        (["--run", "RUN", "--system", "Be kind."], "--system is a turn of a chat"),
        (["--run", "RUN", "--answer", "The"], "--answer is a turn of a chat"),
        (["--run", "RUN/checkpoints"], "Name the run_dir of a training"),
        (["RUN", "the", "--prompt", "cat"], "the and --prompt cat are both given"),
        (["RUN", "the", "--run", "RUN"], "--model names model and weights"),
        (["--checkpoint", "/"], "/ holds no checkpoint"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], error: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", *(word.replace("RUN", str(run_dir)) for word in words)])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chat_model(tmp_path: Path) -> ModelFolder:
    """As a run of fine-tuning on conversations leaves it, with a tokenizer whose documents end otherwise than turns."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0} | {c: i for i, c in enumerate(TEXT, 1)}, "?"))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    return ModelFolder(
        path=tmp_path,
        model=MODEL,
        platform=PlatformConfig(),
        tokenizer=TokenizerConfig(kind="huggingface", path=str(tmp_path)),
        chat_template="tokenizer",
    )


@pytest.mark.parametrize(("system", "answer"), [("the dog", None), (None, None), (None, "the dog")])
def test_a_chat_begins_goes_on_and_ends_as_transformers_has_it(
    chat_model: ModelFolder, system: str | None, answer: str | None
) -> None:
    request = request_of(argparse.Namespace(chat=True, prompt="the cat", system=system, answer=answer), chat_model)
    theirs = PreTrainedTokenizerFast.from_pretrained(chat_model.tokenizer.path)
    given = {"system": system, "user": "the cat", "assistant": answer}
    turns = [{"role": role, "content": content} for role, content in given.items() if content]
    form = {"continue_final_message": True} if answer else {"add_generation_prompt": True}
    assert list(request.prompt_T) == theirs.apply_chat_template(turns, **form, return_dict=True)["input_ids"]
    end, text = theirs.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert request.ends == {end, text} and (answer is None or request.shown == answer)
    assert request.text_of([*theirs.encode(" sat" if answer else "sat"), end]) == (" sat" if answer else "sat")
    marked = argparse.Namespace(chat=False, prompt="<|im_start|>the cat<|im_end|>", system=None, answer=None)
    assert list(request_of(marked, chat_model).prompt_T) == theirs.encode(marked.prompt)
    assert request_of(marked, chat_model).ends == request.ends


def test_a_server_is_asked_for_the_text_of_its_own_weights(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's tokens come from a table, by the seed of each continuation and the prompt's first token."""
    tokenizer = sentencepiece_of(run_dir / "tokens.model")
    prompt_T = tokenizer.encode_marked("the cat")
    with FakeServer(TableAnswers(300)) as server:
        words = ("--run", run_dir, "--prompt", "the cat", "--tokens", 6, "--n", 2, "--seed", 4)
        shown = generate(capsys, *words, "--temperature", 1, "--url", server.url)
        (first, second) = sorted(server.bodies("/inference/v1/generate"), key=lambda b: b["sampling_params"]["seed"])
    assert first["token_ids"] == second["token_ids"] == prompt_T
    assert [body["sampling_params"]["seed"] for body in (first, second)] == [4, 5]
    for seed in (4, 5):
        tokens = [(seed * 7919 + t * 104729 + prompt_T[0]) % 300 for t in range(6)]
        assert escaped(tokenizer.decode([*prompt_T, *tokens])) in shown
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--run", str(run_dir), "--url", server.url, "--stream"])
    assert "neither --checkpoint nor --stream" in capsys.readouterr().err


def test_a_server_with_the_runs_weights_writes_what_the_native_engine_writes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedily, and by seeds at a temperature under a cut."""
    words = ("--run", run_dir, "--prompt", "the cat", "--tokens", 12)
    for asked in (words, (*words, "--n", 3, "--seed", 7, "--temperature", 0.8, "--top-k", 50)):
        wanted = generate(capsys, *asked)
        mesh, chunks = built()
        load_weights(chunks, mesh, MODEL, run_dir)
        with FakeServer(ModelAnswers(chunks, mesh, MODEL, {})) as server:
            assert generate(capsys, *asked, "--url", server.url) == wanted
            assert len(server.bodies("/inference/v1/generate")) == wanted.count("the cat")
    assert len(set(wanted.split("---"))) == 4
