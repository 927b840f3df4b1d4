"""The real huggingface_hub pushes an export to a server on this machine that answers as the Hub does."""

import base64
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest

from mcore_rl.cli.cli import main
from tests.conversion import imported, saved

TOKEN = "hf_secretOfThisTest"


class FakeHub(ThreadingHTTPServer):
    """Takes repositories and commits, and keeps what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.there: list[str] = []
        self.deleted: set[str] = set()
        self.tokens: set[str | None] = set()
        self.is_private = True
        self.status = 200
        self.status_of_pushes = 200


class Answer(BaseHTTPRequestHandler):
    server: FakeHub

    def do_POST(self) -> None:
        if self.server.status_of_pushes != 200:
            self.server.status = self.server.status_of_pushes
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/me/tiny", "name": "me/tiny", "id": "me/tiny"})
        elif self.path.endswith("/preupload/main"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    self.server.deleted.add(line["value"]["path"])
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{self.server.url}/me/tiny/commit/abc", "commitOid": "abc"})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        siblings = [{"rfilename": name} for name in self.server.there]
        known = {"id": "me/tiny", "name": "me", "private": self.server.is_private, "siblings": siblings, "tags": []}
        listed = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.server.there]
        self.answer(listed if "/tree/" in self.path else known)

    def answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with FakeHub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    return imported(saved("qwen3_moe", folder / "hf"), folder / "ckpt")


def words(checkpoint: Path, out: Path, *more: str) -> list[str]:
    return ["convert", "export", str(checkpoint), str(out), "--tokenizer", "none", "--workers", "1", *more]


def is_private(created: dict[str, Any]) -> bool:
    """Whether a request makes a private repository, in the words of huggingface_hub 2 or of earlier ones."""
    return created["visibility"] == "private" if "visibility" in created else created["private"]


def test_an_export_is_pushed_into_a_private_repository(hub, checkpoint, tmp_path, capfd):
    out = tmp_path / "out"
    assert main(words(checkpoint, out, "--push-to-hub", "me/tiny")) == 0
    assert [(one["name"], one["organization"], is_private(one)) for one in hub.created] == [("tiny", "me", True)]
    assert hub.files == {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors"} <= {name.replace("-00001-of-00001", "") for name in hub.files}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    shown = capfd.readouterr()
    assert f"{hub.url}/me/tiny" in shown.out.replace("\n", "") and TOKEN not in shown.out + shown.err


@pytest.mark.full
def test_files_of_an_earlier_export_go_where_readers_would_take_them_for_the_new(hub, checkpoint, tmp_path):
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    read = ["model.safetensors.index.json", "adapter_config.json", "chat_template.jinja", "tokenizer.json"]
    read += ["hf_quant_config.json", "generation_config.json", "additional_chat_templates/tool_use.jinja"]
    kept = [".gitattributes", "LICENSE", "results/model.safetensors", "pytorch_model.bin"]
    hub.there = [*shards, *read, *kept, "config.json", "model.safetensors", "README.md"]
    out = tmp_path / "out"
    assert main(words(checkpoint, out, "--push-to-hub", "me/tiny")) == 0
    assert {"config.json", "model.safetensors", "README.md"} <= hub.files.keys()
    assert hub.deleted == {*shards, *read}


@pytest.mark.full
def test_a_dry_run_lists_the_files_and_sends_nothing(hub, checkpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("HF_TOKEN")
    out = tmp_path / "out"
    assert main(words(checkpoint, out, "--push-to-hub", "me/tiny", "--dry-run", "--public")) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert main(words(checkpoint, out)) == 0
    (weights,) = out.glob("*.safetensors")
    assert f"{weights.name} {weights.stat().st_size / 1024:.0f}"[:-2] in shown
    assert "me/tiny, a public repository of a model. Nothing was written or sent." in shown
    assert not hub.tokens


def test_a_public_repository_is_not_written_to_unless_asked(hub, checkpoint, tmp_path, capfd):
    hub.is_private = False
    assert main(words(checkpoint, tmp_path / "out", "--push-to-hub", "me/tiny")) == 2
    error = capfd.readouterr().err
    assert "me/tiny is public. Add --public to push there" in error and hub.created == []
    assert not (tmp_path / "out").exists()
    push = words(checkpoint, tmp_path / "out2", "--push-to-hub", "me/tiny", "--public")
    assert main(push) == 0 and not is_private(hub.created[-1]) and hub.files


@pytest.mark.full
def test_an_export_that_the_hub_refuses_stays_and_can_be_pushed_later(hub, checkpoint, tmp_path, capfd):
    hub.status_of_pushes = 403
    out = tmp_path / "out"
    assert main(words(checkpoint, out, "--push-to-hub", "me/tiny")) == 2
    error = capfd.readouterr().err
    assert f"{out} is complete; to push it later: hf upload me/tiny {out}" in error
    assert "403" in error and TOKEN not in error and (out / "config.json").is_file()


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_refuses_the_token_or_fails_is_known_before_the_export(hub, checkpoint, tmp_path, status, capfd):
    hub.status = status
    assert main(words(checkpoint, tmp_path / "out", "--push-to-hub", "tiny")) == 2
    error = capfd.readouterr().err
    assert "--push-to-hub tiny: the Hub refuses, or cannot be reached" in error and TOKEN not in error
    assert not (tmp_path / "out").exists() and hub.created == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--push-to-hub", "me/tiny/x"), "--push-to-hub me/tiny/x is no name of a repository"),
        (("--push-to-hub", "me/ti ny"), "Give OWNER/NAME"),
        (("--push-to-hub", "me/tiny"), "finds no token. Set HF_TOKEN"),
        (("--public",), "--public means nothing without --push-to-hub NAME"),
        (("--dry-run",), "--dry-run means nothing without --push-to-hub NAME"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_the_export(more, message, checkpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main(words(checkpoint, tmp_path / "out", *more)) == 2
    assert message in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_a_missing_library_is_named(checkpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(words(checkpoint, tmp_path / "out", "--push-to-hub", "me/tiny")) == 2
    assert "--push-to-hub needs `pip install huggingface_hub`" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
