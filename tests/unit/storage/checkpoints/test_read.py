"""A path means the checkpoint that the tracker file names; where it names none, the error lists what is there."""

from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.errors import CheckpointError
from mcore_rl.storage.checkpoint import find_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("iter_0000005", "release"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("text", "name"), [("5\n", "iter_0000005"), ("release", "release")])
def test_the_tracker_names_the_checkpoint(text: str, name: str, folder: Path) -> None:
    (folder / TRACKER).write_text(text)
    assert find_checkpoint(folder) == folder / name


@pytest.mark.parametrize(
    ("content", "holds"),
    [
        (b"", "holds ''"),
        (b"garbage\xff\x00", "holds 'garbage"),
        (b"../elsewhere", "holds '../elsewhere'"),
        (b"9" * 5000, "holds '9999"),
        (b"-5", "holds '-5'"),
        (b"7", "names iter_0000007, which is not there"),
    ],
    ids=["nothing", "bytes", "path", "digits", "sign", "gone"],
)
def test_garbage_or_nothing_in_the_tracker_is_a_clear_error(
    content: bytes, holds: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / TRACKER).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        find_checkpoint(folder)
    message = str(error.value)
    assert message.startswith(f"{folder}/{TRACKER} {holds}")
    assert "wanted the step of a checkpoint, or 'release'. Name one of iter_0000005, release itself" in message
    assert main(["inspect", str(folder)]) == 2
    assert f"{TRACKER} {holds}" in capsys.readouterr().err
