"""Which checkpoint folders count, and how they come and go."""

from pathlib import Path

import pytest

from mcore_rl.checkpoint.folder import (
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
from mcore_rl.errors import CheckpointError


def made(path: Path, step: int, *, complete: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"12345")
    if complete:
        marker = Marker(
            step=step,
            time="now",
            world_size=1,
            mesh={"tp": 1},
            model={},
            megatron="0.16",
            files={"__0_0.distcp": 5},
        )
        write_marker(path, marker)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_are_ordered_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (9_999_999, 20_000_000, 100):
        made(path_of_step(tmp_path, step), step)
    (tmp_path / "iter_0000007").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == [
        "iter_0000100",
        "iter_9999999",
        "iter_20000000",
    ]


def test_only_what_is_whole_counts_as_complete(tmp_path: Path) -> None:
    made(path_of_step(tmp_path, 1), 1)
    made(path_of_step(tmp_path, 2), 2, complete=False)
    (made(path_of_step(tmp_path, 3), 3) / "__0_0.distcp").write_bytes(b"123")
    assert [path.name for path in complete_in(tmp_path)] == ["iter_0000001"]
    with pytest.raises(
        CheckpointError,
        match=r"iter_0000003 is damaged: its file __0_0.distcp has 3 bytes, 5 were.*iter_0000001",
    ):
        check(path_of_step(tmp_path, 3))


def test_publishing_names_the_checkpoint_and_moves_latest(tmp_path: Path) -> None:
    publish(made(tmp_path / "writing_a", 5), path_of_step(tmp_path, 5))
    assert names(tmp_path) == ["iter_0000005", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5\n"


def test_a_step_saved_once_more_takes_the_place_of_the_old(tmp_path: Path) -> None:
    old = made(path_of_step(tmp_path, 5), 5)
    (old / "old").touch()
    publish(made(tmp_path / "writing_a", 5), old)
    assert not (old / "old").exists() and check(old).step == 5
    delete(superseded(tmp_path, keep="all"))
    assert names(tmp_path) == ["iter_0000005", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(("keep", "kept"), [(0, [1, 2, 3]), (1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_the_newest_are_kept(keep: int, kept: list[int], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made(path_of_step(tmp_path, step), step)
    delete(superseded(tmp_path, keep))
    assert names(tmp_path) == [path_of_step(tmp_path, step).name for step in kept]


def test_what_is_not_complete_is_neither_kept_nor_deleted(tmp_path: Path) -> None:
    """It is not ours to delete, and must not push out one that is complete."""
    made(path_of_step(tmp_path, 1), 1)
    made(path_of_step(tmp_path, 2), 2, complete=False)
    assert superseded(tmp_path, keep=1) == []


def test_leftovers_of_killed_runs_are_put_right(tmp_path: Path) -> None:
    made(path_of_step(tmp_path, 1), 1)
    made(tmp_path / "writing_0000002_a", 2)
    made(tmp_path / "writing_0000003_b", 3, complete=False)
    made(tmp_path / "deleting_iter_0000000_0", 0)
    lines = clean(tmp_path)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]
    assert lines == [
        "removed deleting_iter_0000000_0, left by a run that was killed",
        "finished the interrupted save iter_0000002",
        "removed writing_0000003_b, left by a run that was killed",
    ]
    assert clean(tmp_path) == []
