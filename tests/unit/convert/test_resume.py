"""A killed conversion is resumed and gives the same bytes; an unfinished output does not have its final name."""

import dataclasses
import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mcore_rl.convert.copying import copier
from mcore_rl.convert.copying.conversion import CopySettings, RecordedTask
from mcore_rl.convert.importing import ImportOptions, plan_import
from mcore_rl.errors import CheckpointError, ConfigError, DataError
from mcore_rl.storage.files import sole_writer
from tests.conversion import ONE_FILE, bytes_of, exported, imported, quiet, read_hf, saved, write_hf
from tests.hf_models import oracle
from tests.replacing import Case, planned
from tests.unit.convert.conftest import Converted

MANY_FILES = CopySettings(workers=2, task_bytes=15_000, shard_bytes=100_000)


def killed(step, source: Path, output: Path, tasks_done: int) -> None:
    """Run `step(source, output)` in a process that is killed when `tasks_done` tasks are done."""

    def has_done_enough() -> bool:
        return len(list((next_work(output) / "done").glob("*.json"))) >= tasks_done

    def begin() -> None:
        parent = os.getpid()

        def wait_to_be_killed(_: int) -> None:
            time.sleep(0.01)  # the record of the last task may be on its way to the disk
            while os.getppid() == parent and has_done_enough():
                time.sleep(0.01)

        step(source, output, dataclasses.replace(MANY_FILES, chunk_done=wait_to_be_killed))

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    while process.is_alive() and not has_done_enough():
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (output / "iter_0000000").exists() and not (output / "config.json").exists()


def next_work(output: Path) -> Path:
    """Return the folder in which an import or an export to `output` grows."""
    if output.name == "ckpt":
        return output / "iter_0000000.converting"
    return output.with_name(f"{output.name}.converting")


@pytest.mark.matrix("exported")
@pytest.mark.parametrize("step", [imported, exported])
def test_a_conversion_killed_at_three_random_points_gives_the_same_bytes(step, tmp_path: Path) -> None:
    source = saved("deepseek_v3", tmp_path / "hf")
    if step is exported:
        source = imported(source, tmp_path / "source")
    name = "ckpt" if step is imported else "hf"
    whole = step(source, tmp_path / "whole" / name, MANY_FILES)
    output = tmp_path / "killed" / name
    for tasks_done in sorted(random.sample(range(1, 25), 3)):
        killed(step, source, output, tasks_done)
    finished = step(source, output, MANY_FILES)
    assert bytes_of(finished) == bytes_of(whole)
    assert not next_work(output).exists()


def test_tasks_that_are_done_are_not_done_again(tmp_path: Path) -> None:
    source, output = saved("deepseek_v3", tmp_path / "hf"), tmp_path / "ckpt"
    killed(imported, source, output, 10)
    files = {file.name: file.stat().st_mtime_ns for file in (next_work(output) / "out").glob("__*")}
    done = {file.stem for file in (next_work(output) / "done").glob("*.json")}
    finished = imported(source, output, MANY_FILES)
    unchanged = {name for name, time_ns in files.items() if (finished / name).stat().st_mtime_ns == time_ns}
    assert unchanged >= {f"__{index}_0.distcp" for index in done}


@pytest.mark.full
def test_an_unfinished_conversion_is_not_resumed_with_another_source_or_option(tmp_path: Path) -> None:
    source, output = saved("deepseek_v3", tmp_path / "hf"), tmp_path / "ckpt"
    killed(imported, source, output, 3)
    with pytest.raises(CheckpointError, match="unfinished conversion of something else"):
        imported(source, output, MANY_FILES, dtype="bf16")
    os.utime(source / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="unfinished conversion of something else"):
        imported(source, output, MANY_FILES)
    again = imported(source, output, dataclasses.replace(MANY_FILES, overwrite=True))
    assert bytes_of(again) == bytes_of(imported(source, tmp_path / "whole" / "ckpt", MANY_FILES))


def test_an_output_that_exists_is_kept_until_its_successor_is_complete(tmp_path: Path) -> None:
    source, output = saved("llama", tmp_path / "hf"), tmp_path / "ckpt"
    first = imported(source, output)
    before = bytes_of(first)
    theirs = oracle("llama")
    changed = {name: tensor + 1 for name, tensor in theirs.tensors.items()}
    other = write_hf(tmp_path / "other", theirs.config, changed)
    with pytest.raises(ConfigError, match="iter_0000000 exists"):
        imported(other, output)
    assert bytes_of(first) == before
    second = imported(other, output, CopySettings(overwrite=True))
    assert second == first and bytes_of(second) != before
    assert sorted(path.name for path in output.iterdir()) == ["iter_0000000", "latest_checkpointed_iteration.txt"]


@pytest.mark.full
def test_two_conversions_to_one_output_do_not_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = saved("deepseek_v3", tmp_path / "hf"), tmp_path / "ckpt"
    killed(imported, source, output, 3)
    with sole_writer(next_work(output) / "lock", wait_s=10.0, remedy=""):
        monkeypatch.setattr(copier, "ORPHANS_S", 0.1)
        with pytest.raises(DataError, match="has another writer"):
            imported(source, output, MANY_FILES)


@pytest.mark.full
def test_a_worker_that_is_killed_ends_the_conversion_with_a_remedy(tmp_path: Path) -> None:
    source = saved("deepseek_v3", tmp_path / "hf")

    def die(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(CheckpointError, match="ended by signal 9"):
        imported(source, tmp_path / "ckpt", dataclasses.replace(MANY_FILES, chunk_done=die))
    assert imported(source, tmp_path / "ckpt", MANY_FILES).exists()


CTRL_C = """
import os, signal, sys
from mcore_rl.cli.cli import main
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_ctrl_c_does_not_reach_a_worker_in_its_first_moment(tmp_path: Path) -> None:
    """The parent handles it: a worker showed a traceback of its own where it was just forked."""
    words = ["convert", "import", str(saved("llama", tmp_path / "hf")), str(tmp_path / "ckpt")]
    command = [sys.executable, "-c", CTRL_C, *words, "--no-check-logits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("where", ["a worker", "the last files"])
def test_a_disk_that_fills_up_ends_the_conversion_with_a_remedy_and_the_same_command_resumes(
    where: str, tmp_path: Path
) -> None:
    source, output = saved("deepseek_v3", tmp_path / "hf"), tmp_path / "ckpt"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = dataclasses.replace(MANY_FILES, chunk_done=full if where == "a worker" else None)
    conversion = plan_import(source, output, ImportOptions(vocab_multiple=16), settings)
    if where == "the last files":
        conversion = dataclasses.replace(conversion, finish=full)
    said = r"ckpt/iter_0000000: No space left on device\. .* GiB are free at .*give the command again"
    with quiet() as progress, pytest.raises(CheckpointError, match=said):
        copier.convert(conversion, settings, progress)
    assert [path.name for path in output.iterdir()] == ["iter_0000000.converting"]
    again = imported(source, output, MANY_FILES)
    assert bytes_of(again) == bytes_of(imported(source, tmp_path / "whole", MANY_FILES))
    assert not next_work(output).exists()


@pytest.mark.full
def test_weights_that_are_overwritten_while_they_are_imported_make_no_checkpoint(tmp_path: Path) -> None:
    source, output = saved("deepseek_v3", tmp_path / "hf"), tmp_path / "ckpt"
    shard = source / "model-00003-of-00003.safetensors"
    size = shard.stat().st_size

    def download_again(_: int) -> None:
        with shard.open("rb+") as file:
            file.seek(size // 2)
            file.write(bytes(size // 2))

    with pytest.raises(CheckpointError, match=r"(?s)source changed while.*\n  .*model-00003-of"):
        imported(source, output, dataclasses.replace(MANY_FILES, chunk_done=download_again))
    assert not list(output.iterdir())
    assert any(not tensor.any() for tensor in read_hf(source).values())
    again = imported(source, output, MANY_FILES)
    assert bytes_of(again) == bytes_of(imported(source, tmp_path / "whole", MANY_FILES))


CHANGES: dict[str, Callable[[Path], object]] = {
    "time": lambda file: os.utime(file),
    "size": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("import", "hf/model-00002-of-00003.safetensors"),
        ("import", "hf/config.json"),
        ("export", "ckpt/iter_0000000/__0_0.distcp"),
        ("export", "ckpt/iter_0000000/common.pt"),
        ("export", "hf/tokenizer.json"),
        ("relayout", "ckpt/iter_0000000/.metadata"),
    ],
)
def test_a_source_that_changes_meanwhile_makes_no_mixture(
    kind: str, name: str, change: str, converted: Converted, tmp_path: Path
) -> None:
    for folder in converted("llama"):
        copy = tmp_path / ("hf" if folder.name == "hf" else "ckpt/iter_0000000")
        shutil.copytree(folder, copy)
    case = Case(kind=kind, source="hf" if kind == "import" else "ckpt", output="out", reference="hf", overwrite=False)
    conversion = planned(case, tmp_path, ONE_FILE)
    finish = conversion.finish

    def changed(out: Path, plan: str, done: Sequence[RecordedTask]) -> None:
        finish(out, plan, done)
        CHANGES[change](tmp_path / name)

    refusal = pytest.raises(CheckpointError, match=rf"(?s)would be a mixture.*{Path(name).name}")
    with quiet() as progress, refusal:
        copier.convert(dataclasses.replace(conversion, finish=changed), ONE_FILE, progress)
    assert {path.name for path in tmp_path.iterdir()} - {"out"} == {"hf", "ckpt"}
    assert not list((tmp_path / "out").glob("*"))
    if change == "time":
        with quiet() as progress:
            assert copier.convert(planned(case, tmp_path, ONE_FILE), ONE_FILE, progress).exists()
