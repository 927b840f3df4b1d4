"""Files that appear whole or not at all."""

import os
import re
from multiprocessing import get_context

import pytest

from mcore_rl.errors import CheckpointError, ConfigError, DataError, TrainingError
from mcore_rl.storage.files import (
    checkpoint_errors_explained,
    create_atomically,
    delete_files,
    disk_errors_explained,
    full_disk_explained,
    machine_error,
    make_folder,
    move_into_place,
    refuse_overlap,
    rename_all,
    sole_writer,
    stamps_of,
    write_atomically,
    written_atomically,
)


def test_a_folder_is_moved_with_all_its_files(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/a").write_text("a")
    move_into_place(tmp_path / "new", tmp_path / "final")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["final", "a"]


def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    write_atomically(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="half"), written_atomically(path) as scratch:
        scratch.write_text("ne")
        raise ValueError("half")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_takes_the_place_of_a_device_or_folder(tmp_path):
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "device", tmp_path / "folder", tmp_path / "pipe", type(tmp_path)(".")):
        with pytest.raises(OSError, match="folder, device or pipe"):
            write_atomically(path, "new")
    assert (tmp_path / "device").is_symlink() and (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture
def cache(tmp_path):
    """A snapshot of a Hugging Face cache, whose files are links to blobs beside it."""
    (tmp_path / "cache/blobs").mkdir(parents=True)
    (tmp_path / "cache/snapshots/a").mkdir(parents=True)
    (tmp_path / "cache/blobs/1").write_text("weights")
    (tmp_path / "cache/snapshots/a/model.safetensors").symlink_to("../../blobs/1")
    (tmp_path / "link").symlink_to(tmp_path / "cache/snapshots/a")
    return tmp_path / "cache"


@pytest.mark.full
@pytest.mark.parametrize(
    ("output", "relation"),
    [
        ("cache/snapshots/a", "is"),
        ("link", "is"),
        ("cache/../link", "is"),
        ("link/sub/sub", "lies in"),
        ("cache/snapshots/a/model.safetensors", "is"),
        ("cache", "contains"),
        ("cache/snapshots", "contains"),
        ("", "contains"),
        ("cache/blobs", "contains"),
    ],
)
def test_an_output_at_in_or_around_a_source_is_refused(output, relation, cache):
    for source in (cache / "snapshots/a", cache.parent / "link"):
        with pytest.raises(ConfigError, match=rf"output \S+ {relation} --reference \(.*Name another output"):
            refuse_overlap(cache.parent / output, [("--reference", source)])


def test_an_output_beside_its_sources_is_accepted(cache):
    # A project's own config.toml and checkpoints make no run of it: no run has written its records there.
    (cache.parent / "config.toml").touch()
    (cache.parent / "checkpoints").mkdir()
    sources = [("CHECKPOINT", cache / "snapshots/a"), ("--reference", cache / "not there")]
    for output in ("cache/snapshots/b", "cache/snapshots/abc", "new/er", "cache/not"):
        refuse_overlap(cache.parent / output, sources)


@pytest.mark.parametrize("record", ["run.json", "writer.json", "metrics.jsonl"])
@pytest.mark.parametrize("output", ["run", "run/export", "run/checkpoints/iter_0000001/export"])
def test_an_output_in_a_run_is_refused(output, record, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run" / record).touch()
    with pytest.raises(ConfigError, match=r"the folder of a run \(.*run\)"):
        refuse_overlap(tmp_path / output, [])


def test_of_several_renamings_all_take_place_or_none(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    moves = [(tmp_path / "a", tmp_path / "old"), (tmp_path / "b", tmp_path / "a")]
    with pytest.raises(FileNotFoundError):
        rename_all([*moves, (tmp_path / "missing", tmp_path / "b")])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: name for name in "abc"}
    rename_all(moves)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "a", "a": "b", "c": "c"}


def test_only_the_files_that_were_seen_are_deleted(tmp_path):
    (tmp_path / "folder/inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (tmp_path / "folder" / name).write_text(name)
    stamps = stamps_of(tmp_path / "folder")
    (tmp_path / "folder/b").write_text("another content")
    (tmp_path / "folder/later").touch()
    delete_files(tmp_path / "folder", stamps)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "folder", "later"]


def _claim(path, claimed):
    claimed.put(create_atomically(path, str(os.getpid())))


def test_of_several_processes_exactly_one_makes_the_file(tmp_path):
    context = get_context("fork")
    claimed = context.SimpleQueue()
    processes = [context.Process(target=_claim, args=(tmp_path / "writer", claimed)) for _ in range(4)]
    for process in processes:
        process.start()
    assert sorted(claimed.get() for _ in processes) == [False, False, False, True]
    for process in processes:
        process.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["writer"]
    assert int((tmp_path / "writer").read_text()) in [process.pid for process in processes]


def test_a_second_writer_is_refused_with_a_remedy_and_a_lock_that_is_a_link_leaves_what_it_leads_to(tmp_path):
    """Another user may have made the link, in a folder that several share."""
    (tmp_path / "kept").write_text("content")
    (tmp_path / "lock").symlink_to(tmp_path / "kept")
    with (
        sole_writer(tmp_path / "lock", wait_s=0.0, remedy=""),
        pytest.raises(DataError, match=r"has another writer .* Wait"),
        sole_writer(tmp_path / "lock", wait_s=0.0, remedy="Wait."),
    ):
        raise AssertionError("two writers")
    assert (tmp_path / "kept").read_text() == "content"


@pytest.mark.parametrize("name", ["file/a", "circle/a", "x" * 300])
def test_a_folder_that_cannot_be_made_is_refused_with_a_remedy(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(DataError, match=r"the folder .* cannot be made: .*\. Choose another"):
        make_folder(tmp_path / name, "Choose another.")


def test_errors_of_the_disk_are_explained(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match=r"Not a directory\. Choose another"),
        disk_errors_explained(tmp_path, "Choose another."),
    ):
        write_atomically(tmp_path / "file/a", "")
    with (
        pytest.raises(CheckpointError, match=r"writing .*/file/a failed: Not a directory\. .* GiB are free"),
        checkpoint_errors_explained(tmp_path / "file/a", "writing"),
    ):
        write_atomically(tmp_path / "file/a", "")


def test_an_error_of_the_disk_names_file_reason_and_remedy_and_other_errors_are_none(tmp_path):
    (tmp_path / "file").touch()

    def found(action):
        with pytest.raises(OSError) as caught:
            action()
        return machine_error(caught.value)

    assert re.fullmatch(
        rf"{tmp_path}/file/a: Not a directory\. Correct the path, .* give the same command again\.",
        str(found((tmp_path / "file/a").read_text)),
    )
    assert found((tmp_path / "absent").read_text) is None
    assert found(lambda: os.kill(os.getpid(), 10**6)) is None  # names no file

    def fill_the_disk():
        with written_atomically(tmp_path / "page"), open("/dev/full", "w", encoding="utf-8") as full:
            full.write("a")

    said = rf"{tmp_path}/page: No space left on device\. .* GiB are free at {tmp_path}\. Make room, and give the same"
    assert re.match(said, str(found(fill_the_disk)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_in_a_run_is_explained_and_other_errors_stay_as_they_are(tmp_path):
    said = rf"^{tmp_path}/run: No space left on device\. .* GiB are free at {tmp_path}\. Make room, and run the same"
    with (
        pytest.raises(TrainingError, match=said),
        full_disk_explained(tmp_path / "run"),
        open("/dev/full", "w", encoding="utf-8") as metrics,
    ):
        metrics.write("{}\n")
    with pytest.raises(FileNotFoundError), full_disk_explained(tmp_path):
        (tmp_path / "absent").read_text()
