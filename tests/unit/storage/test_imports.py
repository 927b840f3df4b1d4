"""The weights of a Hugging Face folder are imported once for the same files, and anew for others."""

import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from mcore_rl.cli import generate
from mcore_rl.cli.cli import main
from mcore_rl.config.run import PretrainConfig
from mcore_rl.convert.hf.folder import small_files
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.storage.folders import import_of, imports_folder, read_model_folder
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.workers.imports import checkpoint_of, ensure_imported
from tests.conversion import differing, imported, read_hf, with_mtp, write_hf
from tests.unit.storage.conftest import in_hub_cache

ENSURE = (
    "import sys; from pathlib import Path; from mcore_rl.workers.imports import ensure_imported; "
    "from mcore_rl.storage.folders import read_model_folder; "
    "ensure_imported(sys.argv[1], read_model_folder(Path(sys.argv[1])).model, Path(sys.argv[2]))"
)


@pytest.fixture
def source(hf_folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to be changed."""
    return Path(shutil.copytree(hf_folder, tmp_path / "model"))


def start(source: Path, run: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ENSURE, str(source), str(run)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    environment.pop("MCORE_RL_CACHE", None)
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)


def test_the_folder_of_imports_is_the_users_the_runs_or_the_caches(tmp_path: Path) -> None:
    run = Path("runs/x")
    assert imports_folder({"MCORE_RL_CACHE": "/big"}, run) == Path("/big")
    assert imports_folder({}, run) == Path("runs/imports")
    assert imports_folder({"XDG_CACHE_HOME": "/c"}, None) == Path("/c/mcore_rl/imports")
    assert imports_folder({"XDG_CACHE_HOME": "relative"}, None) == Path.home() / ".cache/mcore_rl/imports"


@pytest.mark.full
def test_two_starts_make_one_import_and_a_changed_file_makes_another(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs/one"
    model = read_model_folder(source).model
    with pytest.raises(CheckpointError, match=f"no import of it yet. .*: mcore-rl convert import {source} "):
        checkpoint_of(str(source), model, run)
    both = [start(source, run) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "".join(said).count("is imported once") == 1
    first = checkpoint_of(str(source), model, run)
    assert first.parent == tmp_path / "runs/imports" and not differing(source, first)
    # The import knows all that its source says.
    known = read_model_folder(first)
    assert known.model == model and known.tokenizer.path == str(first / "iter_0000000")

    capfd.readouterr()
    ensure_imported(str(source), model, run)
    assert capfd.readouterr().err == ""
    os.utime(next(source.glob("*.safetensors")), (1, 1))
    with pytest.raises(CheckpointError, match="no import of it yet"):
        checkpoint_of(str(source), model, run)


@pytest.mark.full
def test_where_the_importing_start_is_killed_its_import_ends_too_and_the_next_start_makes_it(
    hf_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs/one"
    first = start(hf_folder, run)
    assert first.stderr is not None and "is imported once" in first.stderr.readline()
    while not (importing := psutil.Process(first.pid).children()):
        time.sleep(0.01)
    first.kill()
    first.wait()
    _, alive = psutil.wait_procs(importing, timeout=2)  # seconds before it would be done
    assert not alive
    again = start(hf_folder, run)
    again.communicate(timeout=300)
    assert again.returncode == 0
    made = checkpoint_of(str(hf_folder), read_model_folder(hf_folder).model, run)
    assert not differing(hf_folder, made)


def test_an_import_is_made_for_what_the_run_wants_of_the_model(tmp_path: Path) -> None:
    config, tensors = with_mtp()
    source = write_hf(tmp_path / "mtp", config, tensors)
    whole = load_run_config(PretrainConfig, None, [f"model.path={source}"])
    less = [f"model.path={source}", "model.mtp_layers=0", "model.vocab_multiple=64"]
    without = load_run_config(PretrainConfig, None, less)
    assert whole.model.mtp_layers == 1
    one, other = (import_of(str(source), config.model, tmp_path) for config in (whole, without))
    assert one is not None and other is not None and one.path != other.path
    assert other.command[4:] == ["--vocab-multiple", "64", "--mtp", "drop"]


@pytest.mark.full
def test_a_folder_without_weights_a_failed_import_and_no_room_are_explained(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model_folder(source).model
    (tmp_path / "file").touch()
    monkeypatch.setenv("MCORE_RL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written to .*file: .* Set MCORE_RL_CACHE"):
        ensure_imported(str(source), model, None)
    monkeypatch.setenv("MCORE_RL_CACHE", str(tmp_path / "imports"))
    shards = sorted(source.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-100])  # a download that was cut off
    with pytest.raises(ConfigError, match=r"could not be imported .status 2.; the reason stands above"):
        ensure_imported(str(source), model, None)
    for shard in shards:
        shard.unlink()
    with pytest.raises(CheckpointError, match=r"no .*safetensors, only an index"):
        ensure_imported(str(source), model, None)
    assert not read_hf(source)
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model holds no checkpoint: .* no weights .*Download or copy"):
        ensure_imported(str(source), read_model_folder(source).model, None)


@pytest.mark.full
def test_a_model_of_the_hubs_cache_is_found_by_name_and_an_unfinished_one_is_refused(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MCORE_RL_CACHE", str(tmp_path / "imports"))
    cached = in_hub_cache(tmp_path / "hub", hf_folder)
    snapshot = cached / "snapshots/0123abcd"
    model = read_model_folder(snapshot).model
    # Commands find it by its name of the hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["inspect", "org/Tiny-MoE"]) == main(["convert", "plan", "org/Tiny-MoE"]) == 0
    monkeypatch.setattr(generate, "ensure_imported", lambda *_: None)
    with pytest.raises(CheckpointError, match=f"no import of it yet. .*: mcore-rl convert import {snapshot} "):
        generate.model_of_arguments(Namespace(model="org/Tiny-MoE"))

    (snapshot / "model-00002-of-00003.safetensors").unlink()
    (cached / "blobs/0123.incomplete").touch()
    with pytest.raises(ConfigError, match="could not be imported"):
        ensure_imported(str(snapshot), model, None)
    assert f"Its download is unfinished ({cached}/blobs/0123.incomplete)" in capfd.readouterr().err
    # Without its tokenizer it would pass for a folder that has none.
    (cached / "blobs/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json is a link to .*, which is not there: .* Give `hf d"):
        read_model_folder(snapshot)


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("tokenizer.json", r"tokenizer\.json is not JSON: .* Take another copy"),
        ("chat_template.jinja", r"chat_template\.jinja is empty\. Download or copy it again"),
    ],
)
def test_a_small_file_that_was_cut_off_is_refused_before_the_import(
    name: str, refusal: str, source: Path, tmp_path: Path
) -> None:
    (source / name).write_bytes((source / name).read_bytes()[:100] if name.endswith("json") else b"")
    with pytest.raises(CheckpointError, match=refusal):
        imported(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_small_files_that_nobody_reads_may_be_what_they_like(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{")
    (tmp_path / "requirements.txt").touch()
    assert sorted(small_files(tmp_path)) == ["notes.json", "requirements.txt"]
    (tmp_path / "merges.txt").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        small_files(tmp_path)
