"""Files that appear whole or not at all."""

import os
from multiprocessing import get_context

import pytest

from mcore_rl.errors import CheckpointError, DataError, TrainingError
from mcore_rl.files import (
    checkpoint_errors_explained,
    create_atomically,
    disk_errors_explained,
    full_disk_explained,
    make_folder,
    move_into_place,
    sole_writer,
    write_atomically,
    written_atomically,
)


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


def test_a_folder_is_moved_with_all_its_files(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/a").write_text("a")
    move_into_place(tmp_path / "new", tmp_path / "final")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["final", "a"]


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


def test_a_second_writer_is_refused_with_a_remedy(tmp_path):
    with (
        sole_writer(tmp_path / "lock", wait_s=0.0, remedy=""),
        pytest.raises(DataError, match=r"has another writer .* Wait"),
        sole_writer(tmp_path / "lock", wait_s=0.0, remedy="Wait."),
    ):
        raise AssertionError("two writers")


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
