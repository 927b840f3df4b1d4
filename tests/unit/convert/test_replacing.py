"""An output replaces nothing but what a conversion of its kind wrote; the run, sources and other files stay."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.convert.copying import copier
from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.errors import CheckpointError, ConfigError
from tests.conversion import bytes_of, exported, imported, quiet, saved
from tests.replacing import KILL_EVERY, Case, check, files_of, make_home, planned

OVERWRITE = CopySettings(workers=1, overwrite=True)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home") / "template"
    make_home(home)
    return home


@pytest.fixture
def home(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "home", symlinks=True)
    return tmp_path / "home"


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 72, 18))
def test_no_random_output_or_kill_costs_a_file(first: int, template: Path, tmp_path: Path) -> None:
    ends = [check(seed, template, tmp_path, kills=seed % KILL_EVERY == 0) for seed in range(first, first + 18)]
    assert {"done", "refused"} <= set(ends)


@pytest.mark.matrix(
    "export-runs/x-runs/x-",
    "export-ckpt-models/base-",
    "export-ckpt-notes.txt-",
    "export-ckpt-out/edited-",
    "relayout-other-ckpt-",
)
@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("export", "runs/x", "runs/x"), "output runs/x is the source (runs/x)"),
        (("export", "runs/x", "runs/x/checkpoints"), "output runs/x/checkpoints lies in the source (runs/x)"),
        (
            ("export", "runs/x", "runs/x/checkpoints/iter_0000000"),
            "output runs/x/checkpoints/iter_0000000 is the checkpoint",
        ),
        (("export", "ckpt", "runs/x/out"), "output runs/x/out lies in the folder of a run"),
        (("export", "ckpt", "."), "output . contains the source (ckpt)"),
        (("export", "ckpt", "models"), "output models contains --reference (models/base)"),
        (("export", "ckpt", "models/base"), "output models/base is --reference (models/base)"),
        (("export", "ckpt", "models/base/new"), "output models/base/new lies in --reference (models/base)"),
        (("export", "ckpt", "notes.txt"), "output notes.txt is a file, and a folder is written"),
        (("export", "ckpt", "links/own"), "output links/own is a link to"),
        (("export", "ckpt", "links/gone"), "output links/gone is a link to"),
        (("export", "ckpt", "out/with_notes"), "notes.txt (not in the manifest). It is not replaced"),
        (("export", "ckpt", "out/with_link"), "more.txt (no file). It is not replaced"),
        (("export", "ckpt", "out/edited"), "config.json (changed since). It is not replaced"),
        (("export", "ckpt", "out/trained"), "model.safetensors (changed since). It is not replaced"),
        (("export", "ckpt", "out/own.replaced"), "has no manifest.json of one. It is not replaced"),
        (("export", "ckpt", "out/busy"), "out/busy.converting is in the way"),
        (("import", "models/base", "models/base"), "lies in the source (models/base)"),
        (("import", "models/base", "runs/x/checkpoints"), "lies in the folder of a run"),
        (("import", "models/base", "newer"), "newer has checkpoints of later steps (iter_0000003)"),
        (("relayout", "ckpt", "ckpt"), "output ckpt/iter_0000000 is the checkpoint"),
        (("relayout", "other", "ckpt"), "was written by `convert import`, not by `convert relayout`"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_an_output_that_would_cost_a_file_is_refused_and_nothing_is_written(
    arguments: tuple[str, ...],
    refusal: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    shutil.copytree("ckpt/iter_0000000", "newer/iter_0000003")
    shutil.copytree("ckpt/iter_0000000", "other/iter_0000000")
    more = ["--reference", "models/base", "--tokenizer", "none"] if arguments[0] == "export" else []
    before = files_of(home)
    assert main(["convert", *arguments, *more, "--overwrite", "--workers", "1"]) == 2
    assert refusal in capsys.readouterr().err.replace("\n", " ")
    assert files_of(home) == before


def test_what_an_export_wrote_is_replaced_and_an_empty_folder_taken(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"own exists\. Name another output, or add --overwrite"):
        exported(home / "ckpt", home / "out/own")
    exported(home / "ckpt", home / "out/own", OVERWRITE)
    assert exported(home / "ckpt", home / "out/empty") == home / "out/empty"
    assert bytes_of(home / "out/own") == bytes_of(home / "out/empty")
    assert (home / "out/own.replaced/old.txt").read_text() == "mine"
    assert not list((home / "out").glob("own.converting*"))


def test_an_older_checkpoint_beside_newer_ones_does_not_become_the_newest(home: Path) -> None:
    folder = home / "several"
    shutil.copytree(home / "ckpt/iter_0000000", folder / "iter_0000003")
    (folder / "latest_checkpointed_iteration.txt").write_text("3\n")
    case = Case(kind="relayout", source="ckpt", output="several", reference=None, overwrite=False)
    with quiet() as progress:
        copier.convert(planned(case, home, OVERWRITE), OVERWRITE, progress)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3\n"


@pytest.mark.full
def test_an_output_whose_naming_fails_gives_the_old_one_its_name_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, replace = bytes_of(home / "out/own"), os.replace

    def failing(old: Path, new: Path) -> None:
        if Path(old).name == "out":
            raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(CheckpointError, match=r"own: Input/output error\..*give the command again"):
        exported(home / "ckpt", home / "out/own", OVERWRITE, dtype="bf16")
    assert bytes_of(home / "out/own") == before
    monkeypatch.setattr(os, "replace", replace)
    exported(home / "ckpt", home / "out/own", OVERWRITE, dtype="bf16")
    assert bytes_of(home / "out/own") == bytes_of(exported(home / "ckpt", home / "again", dtype="bf16"))


def test_an_output_that_somebody_changes_meanwhile_is_not_replaced(home: Path) -> None:
    def note(_: Path) -> None:
        (home / "out/own/notes.txt").write_text("written while the conversion ran")

    case = Case(kind="export", source="ckpt", output="out/own", reference=None, overwrite=True)
    conversion = planned(case, home, OVERWRITE)
    object.__setattr__(conversion, "check", note)
    with quiet() as progress, pytest.raises(ConfigError, match=r"own was changed meanwhile, and is not replaced"):
        copier.convert(conversion, OVERWRITE, progress)
    assert (home / "out/own/notes.txt").read_text() == "written while the conversion ran"


@pytest.mark.full
def test_records_of_an_output_that_was_named_do_not_pass_for_tasks_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Killed between the two, a conversion that was given again with --overwrite once wrote weights of zeros.
    checkpoint = imported(saved("llama", tmp_path / "hf"), tmp_path / "ckpt")
    out = tmp_path / "out"

    def end(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copier, "_tidy", end)
    with pytest.raises(KeyboardInterrupt):
        exported(checkpoint, out)
    monkeypatch.undo()
    assert (tmp_path / "out.converting/done").is_dir()
    written = bytes_of(out)
    exported(checkpoint, out, OVERWRITE)
    assert bytes_of(out) == written and not (tmp_path / "out.converting").exists()


def test_a_folder_of_the_manifest_is_an_outputs_own(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "hf")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    checkpoint = imported(source, tmp_path / "ckpt")
    out = exported(checkpoint, tmp_path / "out", reference=source)
    recorded = json.loads((out / "manifest.json").read_text())["files"]
    assert "additional_chat_templates/tools.jinja" in recorded
    exported(checkpoint, out, OVERWRITE, reference=source)
    (out / "additional_chat_templates/tools.jinja").write_text("{{ mine }}")
    with pytest.raises(ConfigError, match=r"tools\.jinja \(changed since\)"):
        exported(checkpoint, out, OVERWRITE, reference=source)


@pytest.mark.parametrize("log", ["models/base/config.json", "ckpt/log.jsonl", "notes.txt"])
def test_a_log_is_appended_to_no_file_of_others(
    log: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    before = files_of(home)
    assert main(["convert", "export", "ckpt", "new", "--reference", "models/base", "--log", log]) == 2
    assert log in capsys.readouterr().err
    assert files_of(home) == before
