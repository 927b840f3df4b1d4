"""Files that appear whole or not at all, and folders with one writer."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.errors import DataError

# A quota and a file-size limit stop a writer as a full disk does; the last two: a file where a folder should be.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)
LOCK_POLL_S = 0.1


def with_ending(prefix: str | Path, ending: str) -> Path:
    """`prefix` + `ending`; unlike Path.with_suffix it keeps a dot in the prefix's name."""
    return Path(f"{prefix}{ending}")


def flush_to_disk(path: Path) -> None:
    """Return when the file's (or folder's) content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old content or all of the new, whatever ends this process."""
    scratch = with_ending(path, f".{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content)
        flush_to_disk(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def disk_errors_explained(folder: Path, remedy: str) -> Iterator[None]:
    """Turns the errors of a full or forbidden disk into a DataError with `remedy`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL + FORBIDDEN:
            raise
        raise DataError(f"{error.filename or folder}: {os.strerror(error.errno)}. {remedy}") from error


@contextmanager
def sole_writer(lock: Path, *, wait_s: float, remedy: str) -> Iterator[None]:
    """Holds the file `lock` for this process and the children it forks; a DataError when another keeps it."""
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
        if os.fstat(handle.fileno()).st_nlink == 0:
            raise DataError(f"another writer has just ended its work in {lock.parent}. {remedy}")
        yield
