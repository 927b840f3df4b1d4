"""Files that appear whole or not at all, folders with one writer, and the errors of a failing disk in words.

Only this module gives finished files and folders their names, and decides whether a command may replace an output
(`refuse_replacing`): nothing that a command of the same kind did not write is replaced.
"""

import errno
import fcntl
import json
import os
import resource
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mcore_rl.errors import CheckpointError, ConfigError, DataError, TrainingError

# A quota and a file-size limit stop a writer as a full disk does; the last two: a file where a folder should be.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG)
NO_MEMORY = ("allocate memory", "MemoryError", "bad_alloc", "failed to map segment", "start new thread")
NO_THREAD = ("Resource temporarily unavailable", "terminate called without an active exception")
"""Errors of gloo and of C++ where a new thread gets no memory for its stack."""
LIMITS = {
    "n": (resource.RLIMIT_NOFILE, 1, ("Too many open files",)),
    "v": (resource.RLIMIT_AS, 1024, NO_MEMORY + NO_THREAD),
}
"""Option of ulimit -> its limit, the unit in which ulimit counts, and texts of the errors of a process at the limit."""
LOCK_POLL_S = 0.1
UNWRITTEN = "cause that could not be written:"
"""Beginning of a line on stderr with the name that the file of a cause would have had, and its headline."""
RESERVE_FILE = "reserve"
"""File next to the causes of a failure that takes room: deleted, it leaves some on a full disk for their words."""
RESERVE_BYTES = 65536
NOT_WRITER = "not_the_writer"
"""File next to the causes of an attempt that has not become the writer of the run's folder, such as an evaluation."""
GIB = 2**30
MARK_BYTES = 4096
"""Bytes at the beginning of a text that are searched for the mark of the command that wrote it."""
MAX_LISTED = 5
RUN_RECORDS = ("run.json", "writer.json", "metrics.jsonl")
"""A run's folder contains at least one of these files from its first second on."""
RUN_CONTENT = ("checkpoints", "config.toml")
"""A run's folder also contains at least one of these entries."""
READ = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""Endings of the files of a model's folder that are read."""
POINTER = b"version https://git-lfs"
POINTER_REMEDY = "It is a pointer of Git LFS, without the content: fetch that with `git lfs pull`."
Stamps = Mapping[str, Sequence[int]]
"""Inode, size and times of each file below a folder, by relative path: while they are the same, so is the content."""


def shipped(folder: str) -> Path:
    """Return `recipes`, `clusters` or `job.sh` of launch/, inside the package or in the checkout."""
    inside = Path(__file__).parents[1] / "shipped"
    return (inside if inside.is_dir() else Path(__file__).parents[2] / "launch") / folder


PACKED = ("", ".gz", ".bz2", ".xz", ".zst")
DATA_ENDINGS = (".parquet", *(kind + packed for kind in (".jsonl", ".json") for packed in PACKED))
"""Endings of data files in a folder that is read as a whole."""


def data_files(folder: Path) -> list[Path]:
    """Return the data files directly in a folder, recognized by their endings, in the order of their names."""
    endings = ".arrow" if is_saved(folder) else DATA_ENDINGS
    return sorted(path for path in folder.iterdir() if path.name.lower().endswith(endings) and path.is_file())


def is_saved(folder: Path) -> bool:
    """Return whether `datasets.save_to_disk` made a folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


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
    """Give a finished file or folder its final name, in place of a file: old or new, never half."""
    # The content first: a file system may otherwise keep the new name after a crash and lose what it stands for.
    flush_to_disk(written)
    os.replace(written, final)
    # The name is content of the folder, which a crash would lose likewise.
    flush_to_disk(final.parent)


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yield a scratch path that becomes `path` when the block ends without an exception. Raises OSError for a folder,
    device or pipe: root may rename a file over /dev/stdout.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is a folder, device or pipe, and no file", str(path))
    # Hidden, and named after host and process, so that two writers of a shared folder do not write to one scratch file.
    scratch = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        yield scratch
        move_into_place(scratch, path)
    except OSError as error:
        # The error of a write, unlike that of an open, names no file.
        if error.filename is None and error.errno in FULL:
            error.filename = str(path)
        raise
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write `path` (text as UTF-8): a reader sees the old content or all of the new, whatever ends the writer."""
    with written_atomically(path) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


def create_atomically(path: Path, content: bytes | str) -> bool:
    """Write `path` as `write_atomically` does unless there is such a file; return whether this process made it."""
    scratch = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        flush_to_disk(scratch)
        # Unlike a rename, a link fails when the name is taken: of several processes exactly one succeeds.
        os.link(scratch, path)
    except FileExistsError:
        return False
    finally:
        scratch.unlink(missing_ok=True)
    flush_to_disk(path.parent)
    return True


def open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream: the next file opened would get its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))


def is_elsewhere(file: IO[Any], path: Path) -> bool:
    """Return whether the open file is no longer the file at `path`, because somebody has deleted or moved it."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
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


def limit_reached(text: str) -> str:
    """Return the end of an error's text that names this process's limit behind it, unless it does already."""
    for option, (limit, unit, texts) in LIMITS.items():
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and any(part in text for part in texts) and "`ulimit" not in text:
            return (
                f". The limit `ulimit -{option}` is {most // unit}: raise it, here or where your cluster or container "
                "sets it, and give the same command again"
            )
    return ""


def machine_error(error: Exception) -> DataError | None:
    """Return the error that the user reads in place of a disk's, a permission's or a limit's; None for any other."""
    if not isinstance(error, OSError):
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return DataError(f"this process: {text}{limit}.") if (limit := limit_reached(text)) else None
    reason = os.strerror(error.errno or 0)
    if limit := limit_reached(reason):
        return DataError(f"{error.filename or 'this process'}: {reason}{limit}.")
    if error.errno in FULL:
        where = "a file, or standard output" if error.filename is None else error.filename
        room = "" if error.filename is None else f" {room_at(Path(error.filename))}."
        return DataError(f"{where}: {reason}.{room} Make room, and give the same command again.")
    if error.errno in FORBIDDEN and error.filename is not None:
        return DataError(
            f"{error.filename}: {reason}. Correct the path, or let this user read and write there, and give the same "
            "command again."
        )
    return None


def make_folder(folder: Path, remedy: str) -> None:
    """Make a folder and those above it where they are missing; DataError with `remedy` where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Of every kind: /proc has no such file, a link goes in a circle, a network's disk has gone.
        raise DataError(f"the folder {folder} cannot be made: {error.strerror}. {remedy}") from error


@contextmanager
def checkpoint_errors_explained(path: Path, doing: str) -> Iterator[None]:
    """Raise a CheckpointError in place of any OSError: the action, the path, and the free space there."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing} {path} failed: {error.strerror or error}. {room_at(path)}") from error


@contextmanager
def run_errors_explained(run_dir: Path) -> Iterator[None]:
    """Raise a DataError in place of any OSError of reading a run: the file, its run, and whose it is."""
    try:
        yield
    except OSError as error:
        file = Path(error.filename or run_dir)
        seen = existing_part(file)
        owner = f"user {seen.stat().st_uid}"
        with suppress(KeyError):  # a number without a name
            owner = seen.owner()
        raise DataError(
            f"{file} of the run {run_dir} cannot be read: {error.strerror}. {seen} belongs to {owner}, who can "
            "give you the right to read all of the run"
        ) from None


@contextmanager
def full_disk_explained(run_dir: Path) -> Iterator[None]:
    """Raise a TrainingError for errors of a full disk in a run's folder; other errors stay."""
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
    path = existing_part(path)
    return f"{shutil.disk_usage(path).free / GIB:.2f} GiB are free at {path}"


def existing_part(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists and can be seen by this user."""
    # Unlike Path.exists, no error in a folder that this user may not enter.
    while not os.path.exists(path):
        path = path.parent
    return path


@contextmanager
def sole_writer(lock: Path, *, wait_s: float, remedy: str) -> Iterator[None]:
    """Lock the file `lock` for this process and its forks; DataError, with `remedy`, after `wait_s` seconds."""
    give_up = time.monotonic() + wait_s
    with suppress(FileExistsError):
        made = os.open(lock, os.O_CREAT | os.O_EXCL)
        os.fchmod(made, lock.parent.stat().st_mode & 0o666)  # who may write there may lock, too
        os.close(made)
    with open(lock, "r+b") as handle:  # "wb" would empty the file that a link of this name leads to
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise DataError(f"{lock.parent} has another writer (it holds {lock}). {remedy}") from error
                time.sleep(LOCK_POLL_S)
        # No link left: the other writer removed the file while this one waited, so that this lock protects nothing.
        if os.fstat(handle.fileno()).st_nlink == 0:
            raise DataError(f"another writer has just ended its work in {lock.parent}. {remedy}")
        yield


def is_run(folder: Path) -> bool:
    """Return whether a training has written to `folder`, or is about to."""
    # Neither alone: a project may have a config.toml and a folder of checkpoints that no run wrote.
    return any(map(os.path.lexists, (folder / name for name in RUN_RECORDS))) and any(
        map(os.path.lexists, (folder / name for name in RUN_CONTENT))
    )


def refuse_overlap(output: Path, sources: Sequence[tuple[str, Path]]) -> None:
    """Raise a ConfigError where an output is, contains or lies in a source (name in the message, path) or a run's
    folder. Links are followed, those in a source too: a Hugging Face cache has its files elsewhere.
    """
    real = Path(os.path.realpath(output))
    own, place, found = _identity(real), _identities(real), []
    for name, source in sources:
        paths = [source]
        with suppress(PermissionError):  # who reads the source names what may not be read
            if source.is_dir():
                paths += [Path(os.path.realpath(entry)) for entry in source.iterdir() if entry.is_symlink()]
        for path in paths:
            identity = _identity(path)
            if identity is None:
                continue
            if identity in place:
                found.append((f"{'is' if identity == own else 'lies in'} {name}", source))
            elif own in _identities(path):
                found.append((f"contains {name}", source))
    if found:
        # Of a run and its checkpoint, say, the one that the output is.
        relation, source = next((each for each in found if each[0].startswith("is ")), found[0])
        raise ConfigError(f"output {output} {relation} ({source}). Name another output.")
    run = next((folder for folder in (real, *real.parents) if is_run(folder)), None)
    if run is not None:
        relation = "is" if run == real else "lies in"
        raise ConfigError(f"output {output} {relation} the folder of a run ({run}). Name another output.")


def refuse_replacing(
    output: Path,
    sources: Sequence[tuple[str, Path]],
    *,
    overwrite: bool,
    foreign: Callable[[Path], str | None],
    folder: bool = False,
) -> Stamps:
    """Raise a ConfigError unless a command may write to `output`: the rule of every command that replaces a path. It
    must not overlap a source or a run. Where it exists, it must be an empty folder, or with `overwrite` all of it the
    unchanged output of such a command: `foreign` returns the end of a sentence on what is not, or None.

    Returns the stamps of the existing files, with which `replace_folder` notices later changes.
    """
    if output.is_symlink():
        raise ConfigError(f"output {output} is a link to {os.readlink(output)}. Name that, or another output.")
    if os.path.lexists(output) and not (output.is_dir() if folder else output.is_file()):
        kind = "folder" if output.is_dir() else "file" if output.is_file() else "device or pipe"
        wanted = "folder" if folder else "file"
        raise ConfigError(f"output {output} is a {kind}, and a {wanted} is written. Name another output.")
    refuse_overlap(output, sources)
    if not os.path.lexists(output):
        return {}
    if folder and output.samefile(os.getcwd()):
        raise ConfigError(f"output {output} is the working folder, which is not replaced. Name another output.")
    stamps = stamps_of(output)
    if folder and not stamps and not any(output.iterdir()):
        return stamps
    if not overwrite:
        raise ConfigError(f"{output} exists. Name another output, or add --overwrite to replace it when all is done.")
    if (fault := foreign(output)) is not None:
        raise ConfigError(f"{output} {fault}. It is not replaced: move it away, or name another output.")
    return stamps


def has_mark(path: Path, mark: str) -> bool:
    """Return whether a text begins with the mark of the command that wrote it."""
    with path.open("rb") as file:
        return mark.encode() in file.read(MARK_BYTES)


def is_event_log(path: Path) -> bool:
    """Return whether a file is empty or begins with a line of JSON that names an event: no other gets more lines."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        line = file.readline(MARK_BYTES)
    try:
        return not line or "event" in json.loads(line)
    except (ValueError, TypeError):
        return False


def foreign_files(folder: Path, recorded: Callable[[str], str | None]) -> str | None:
    """Return the end of a sentence on files in `folder` with a fault that `recorded` returns; None: no file."""
    faults = []
    for name, entry in _entries(folder):
        if stat.S_ISDIR(entry.st_mode):
            fault = None if any((folder / name).iterdir()) else "an empty folder"
        else:
            fault = recorded(name) if stat.S_ISREG(entry.st_mode) else "no file"
        if fault is not None:
            faults.append(f"{name} ({fault})")
    if not faults:
        return None
    more = f" and {len(faults) - MAX_LISTED} more" if len(faults) > MAX_LISTED else ""
    return f"holds what this command did not write: {', '.join(faults[:MAX_LISTED])}{more}"


def stamps_of(path: Path) -> Stamps:
    """Return the stamps of all files and links below a folder, or of a file."""
    entries = _entries(path) if path.is_dir() else [("", path.lstat())]
    return {
        name: (entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns)
        for name, entry in entries
        if not stat.S_ISDIR(entry.st_mode)
    }


def sizes_and_times(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return the number of bytes, and the time of the last change in ns, of each of the files that exists."""
    # Links are followed: a Hugging Face cache has its files elsewhere. No inodes: some file systems make them up.
    found = [(file, file.stat()) for file in files if file.exists()]
    return {file: (entry.st_size, entry.st_mtime_ns) for file, entry in found}


def replace_folder(written: Path, final: Path, aside: Path, stamps: Stamps) -> None:
    """Give a folder the name `final`; a folder there is renamed to `aside`, and back if the naming fails. Raises
    ConfigError if somebody has changed `final` since `refuse_replacing` returned `stamps`.
    """
    # An empty folder may be there: a rename replaces it, and fails where something has been put into it.
    if not stamps:
        move_into_place(written, final)
        return
    if not final.is_dir() or final.is_symlink() or stamps_of(final) != stamps:
        raise ConfigError(f"{final} was changed meanwhile, and is not replaced. Name another output.")
    rename_all([(final, aside), (written, final)])


def rename_all(moves: Sequence[tuple[Path, Path]]) -> None:
    """Rename files or folders, flushed to the disk, in turn; where one fails, those before it get their names back."""
    done: list[tuple[Path, Path]] = []
    try:
        for old, new in moves:
            move_into_place(old, new)
            done.append((old, new))
    except BaseException:
        for old, new in reversed(done):
            if not os.path.lexists(old):
                os.replace(new, old)
        raise


def delete_files(folder: Path, stamps: Stamps) -> None:
    """Delete the files that still have these stamps, and the folders that are empty then; other files stay."""
    for name, stamp in stamps_of(folder).items():
        if stamp == tuple(stamps.get(name, ())):
            (folder / name).unlink()
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield relative path and status of everything below a folder; links are not followed."""
    # Without onerror, os.walk leaves out folders that it cannot read.
    for path, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            entry = Path(path) / name
            yield str(entry.relative_to(folder)), entry.lstat()


def _raise(error: OSError) -> None:
    raise error


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode, which two names of one file share; None: it does not exist, or is not to be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _identities(path: Path) -> set[tuple[int, int]]:
    real = Path(os.path.realpath(path))
    return {identity for each in (real, *real.parents) if (identity := _identity(each)) is not None}


def unfinished_download(folder: Path) -> str:
    """Describe a partially downloaded file for an error message; empty without any."""
    # The client keeps parts in the folder itself (--local-dir), or next to all snapshots of its cache.
    places = [folder / ".cache/huggingface/download"]
    if folder.absolute().parent.name == "snapshots":
        places.append(folder.absolute().parents[1] / "blobs")
    parts = sorted(part for place in places for part in place.rglob("*.incomplete"))
    return f" Its download is unfinished ({parts[0]}): `hf download` goes on with it." if parts else ""


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is Git's pointer to a file that Git LFS stores; False for one that cannot be read."""
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER
    return False


def refuse_absent_content(folder: Path) -> None:
    """Raise CheckpointError for a pointer of Git LFS or a dead link: the rest might pass for another model."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.suffix in READ and entry.is_symlink() and not os.path.exists(entry):
            raise CheckpointError(
                f"{entry} is a link to {os.readlink(entry)}, which is not there: a part of the download is missing. "
                f"Give `hf download` again, or put the file there.{unfinished_download(folder)}"
            )
        # Weights are looked at where they are read: a folder may have further ones, which were not fetched.
        if entry.suffix in READ and entry.suffix != ".safetensors" and entry.is_file() and is_lfs_pointer(entry):
            raise CheckpointError(f"{entry} holds no data. {POINTER_REMEDY}")
