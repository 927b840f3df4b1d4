"""Files that appear whole or not at all, folders with one writer, and what a failing disk means to the user.

This is the only module that gives a finished file or folder its name: everything that a reader may find under a final
name was complete before it got there.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.errors import CheckpointError, DataError, TrainingError

# A quota and a file-size limit stop a writer as a full disk does; the last two: a file where a folder should be.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
)
LOCK_POLL_S = 0.1
RESERVE_FILE = "reserve"
"""File beside the causes of a failure that takes room: deleted, it leaves some on a full disk for their words."""
RESERVE_BYTES = 65536
GIB = 2**30


def with_ending(prefix: str | Path, ending: str) -> Path:
    """Return `prefix` + `ending`; unlike Path.with_suffix it keeps a dot in the prefix's name."""
    return Path(f"{prefix}{ending}")


def flush_to_disk(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_into_place(written: Path, final: Path) -> None:
    """Give the finished file or folder `written` the name `final`, where a file of that name is replaced.

    A reader sees the old content or all of the new. When this returns, a crash of the machine loses neither.
    """
    # The content first: a file system may otherwise keep the new name after a crash and lose what it stands for.
    flush_to_disk(written)
    os.replace(written, final)
    # The name is content of the folder, which a crash would lose likewise.
    flush_to_disk(final.parent)


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yield a scratch path to write to, which becomes `path` when the block ends without an exception.

    Raises:
        OSError: `path` is a folder, or a device, pipe or link to one, whose place a file would take: root may rename a
            file over /dev/stdout.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is a folder, device or pipe, and no file", str(path))
    # Hidden, and named after host and process, so that two writers of a shared folder do not write to one scratch file.
    scratch = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        yield scratch
        move_into_place(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write `path` (text as UTF-8): a reader sees the old content or all of the new, whatever ends the writer."""
    with written_atomically(path) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


def create_atomically(path: Path, content: str) -> bool:
    """Write `path` as `write_atomically` does unless there is such a file; return whether this process made it."""
    scratch = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        scratch.write_text(content, encoding="utf-8")
        flush_to_disk(scratch)
        # Unlike a rename, a link fails when the name is taken: of several processes exactly one succeeds.
        os.link(scratch, path)
    except FileExistsError:
        return False
    finally:
        scratch.unlink(missing_ok=True)
    flush_to_disk(path.parent)
    return True


@contextmanager
def disk_errors_explained(folder: Path, remedy: str) -> Iterator[None]:
    """Raise a DataError with `remedy` in place of the errors of a full or forbidden disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL + FORBIDDEN:
            raise
        raise DataError(f"{error.filename or folder}: {os.strerror(error.errno)}. {remedy}") from error


def make_folder(folder: Path, remedy: str) -> None:
    """Make a folder and those above it where they are missing; DataError with `remedy` where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Of every kind: /proc has no such file, a link goes in a circle, a network's disk has gone.
        raise DataError(f"the folder {folder} cannot be made: {error.strerror}. {remedy}") from error


@contextmanager
def checkpoint_errors_explained(path: Path, doing: str) -> Iterator[None]:
    """Raise a CheckpointError in place of any OSError: what was being done, to which path, and the free space there."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing} {path} failed: {error.strerror or error}. {room_at(path)}") from error


@contextmanager
def full_disk_explained(run_dir: Path) -> Iterator[None]:
    """Raise a TrainingError in place of the errors of a full disk in the run of a folder; others stay as they are."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise TrainingError(
            f"{error.filename or run_dir}: {os.strerror(error.errno)}. {room_at(run_dir)}. Make room, and run the same "
            "command again: it goes on from the last complete checkpoint."
        ) from error


def room_at(path: Path) -> str:
    """Return a sentence on the free space of the file system that `path` is or would be on."""
    while not path.exists():
        path = path.parent
    return f"{shutil.disk_usage(path).free / GIB:.2f} GiB are free at {path}"


@contextmanager
def sole_writer(lock: Path, *, wait_s: float, remedy: str) -> Iterator[None]:
    """Lock the file `lock` for this process and the children it forks.

    Args:
        lock: A file in the folder that is to have one writer; it is made if need be.
        wait_s: Seconds to wait for another writer to end.
        remedy: What the user can do when it does not end, as a sentence.

    Raises:
        DataError: Another process keeps the lock, or has just ended its work and removed the folder.
    """
    give_up = time.monotonic() + wait_s
    with open(lock, "wb") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise DataError(
                        f"{lock.parent} has another writer (it holds {lock}). {remedy}"
                    ) from error
                time.sleep(LOCK_POLL_S)
        # No link left: the other writer removed the file while this one waited, so that this lock protects nothing.
        if os.fstat(handle.fileno()).st_nlink == 0:
            raise DataError(f"another writer has just ended its work in {lock.parent}. {remedy}")
        yield
