"""Checkpoint folders: which are complete, and how they are published and deleted."""

from pathlib import Path
from typing import Literal

import pytest

from mcore_rl.errors import CheckpointError
from mcore_rl.storage.checkpoint import (
    MANIFEST,
    Marker,
    check,
    checkpoints_in,
    clean,
    complete_in,
    delete,
    path_of_step,
    publish,
    superseded,
    write_marker,
)


def make_checkpoint(path: Path, step: int, *, complete: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"12345")
    if complete:
        marker = Marker(
            step=step, time="now", world_size=1, mesh={"tp": 1}, model={}, megatron="0.16", files={"__0_0.distcp": 5}
        )
        write_marker(path, marker)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_are_ordered_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (9_999_999, 20_000_000, 100):
        make_checkpoint(path_of_step(tmp_path, step), step)
    (tmp_path / "iter_0000007").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["iter_0000100", "iter_9999999", "iter_20000000"]


def test_a_checkpoint_with_a_missing_marker_or_a_short_file_is_not_complete(tmp_path: Path) -> None:
    make_checkpoint(path_of_step(tmp_path, 1), 1)
    make_checkpoint(path_of_step(tmp_path, 2), 2, complete=False)
    (make_checkpoint(path_of_step(tmp_path, 3), 3) / "__0_0.distcp").write_bytes(b"123")
    assert [path.name for path in complete_in(tmp_path)] == ["iter_0000001"]
    damage = r"iter_0000003 is damaged: its file __0_0.distcp has 3 bytes, 5 were.*iter_0000001"
    with pytest.raises(CheckpointError, match=damage):
        check(path_of_step(tmp_path, 3))


def test_publishing_renames_the_checkpoint_updates_latest_and_replaces_an_old_one_of_the_step(tmp_path: Path) -> None:
    old = path_of_step(tmp_path, 5)
    publish(make_checkpoint(tmp_path / "writing_a", 5), old)
    assert names(tmp_path) == ["iter_0000005", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5\n"
    (old / "old").touch()
    publish(make_checkpoint(tmp_path / "writing_b", 5), old)
    assert not (old / "old").exists() and check(old).step == 5
    delete(superseded(tmp_path, keep="all"))
    assert names(tmp_path) == ["iter_0000005", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(("keep", "remaining"), [("all", [1, 2, 3]), (1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_the_newest_are_kept(keep: int | Literal["all"], remaining: list[int], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(path_of_step(tmp_path, step), step)
    delete(superseded(tmp_path, keep))
    assert names(tmp_path) == [path_of_step(tmp_path, step).name for step in remaining]


def test_a_converted_checkpoint_is_not_deleted_by_a_run_that_goes_on_from_it(tmp_path: Path) -> None:
    (make_checkpoint(path_of_step(tmp_path, 0), 0) / MANIFEST).write_text("{}")
    for step in (1, 2, 3):
        make_checkpoint(path_of_step(tmp_path, step), step)
    delete(superseded(tmp_path, keep=1))
    assert names(tmp_path) == ["iter_0000000", "iter_0000003"]


def test_an_incomplete_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    """Another program may have written it, and it must not displace one that is complete."""
    make_checkpoint(path_of_step(tmp_path, 1), 1)
    make_checkpoint(path_of_step(tmp_path, 2), 2, complete=False)
    assert superseded(tmp_path, keep=1) == []


def test_leftovers_of_killed_runs_are_finished_or_removed(tmp_path: Path) -> None:
    make_checkpoint(path_of_step(tmp_path, 1), 1)
    make_checkpoint(tmp_path / "writing_0000002_a", 2)
    make_checkpoint(tmp_path / "writing_0000003_b", 3, complete=False)
    make_checkpoint(tmp_path / "deleting_iter_0000000_0", 0)
    lines = clean(tmp_path)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]
    assert lines == [
        "removed deleting_iter_0000000_0, left by a run that was killed",
        "finished the interrupted save iter_0000002",
        "removed writing_0000003_b, left by a run that was killed",
    ]
    assert clean(tmp_path) == []
    # Killed after it had its name: job scripts read in the file how far the run has come.
    make_checkpoint(path_of_step(tmp_path, 4), 4)
    assert clean(tmp_path) == ["latest_checkpointed_iteration.txt did not name iter_0000004, and does now"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    assert clean(tmp_path) == []
