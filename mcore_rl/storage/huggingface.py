"""The small files of a Hugging Face folder, and which folders are Hugging Face's."""

import json
import os
from pathlib import Path
from typing import Any

from mcore_rl.errors import CheckpointError

POINTER = b"version https://git-lfs"
POINTER_REMEDY = "It is a pointer of Git LFS, without the content: fetch that with `git lfs pull`."
NOT_JSON = (ValueError, RecursionError, MemoryError)
"""Exceptions that parsing JSON raises; the last two on crafted texts."""
READ = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""Endings of the files of a folder that are read."""
READ_JSON = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""JSON files of a folder that are read; any other may be what it likes."""
VOCABULARIES = ("vocab.json", "merges.txt")


def is_hf(path: Path) -> bool:
    """Return whether a path is of Hugging Face's format: a safetensors file, or a folder that has some."""
    return path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors*")))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError if it cannot be read or is not JSON."""
    refuse_special_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Let this user read it, or take another copy."
        ) from error
    except NOT_JSON as error:
        remedy = POINTER_REMEDY if is_lfs_pointer(path) else "Take another copy."
        raise CheckpointError(f"{path} is not JSON: {error or 'too large'}. {remedy}") from error


def refuse_special_file(path: Path) -> None:
    """Raise CheckpointError for a pipe or device, which could be read forever; a path that does not exist passes."""
    if path.exists() and not path.is_file():
        raise CheckpointError(
            f"{path} is no regular file, but a folder, pipe or device. Put the file itself there."
        )


def refuse_dangling_links(folder: Path) -> None:
    """Raise CheckpointError for a file of a folder that is a link to nothing, as the hub's cache has them where its
    blobs were deleted: a folder without the file, such as the tokenizer, might pass for another model.
    """
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.suffix in READ and entry.is_symlink() and not os.path.exists(entry):
            raise CheckpointError(
                f"{entry} is a link to {os.readlink(entry)}, which is not there: a part of the download is missing. "
                f"Give `hf download` again, or put the file there.{unfinished_download(folder)}"
            )


def refuse_cut_off(file: Path) -> None:
    """Raise CheckpointError for a file that is read with a model and is empty, or begins JSON that does not end."""
    if file.name in READ_JSON:
        read_json(file)
    elif (file.suffix in (".jinja", ".model") or file.name in VOCABULARIES) and not file.stat().st_size:
        raise CheckpointError(f"{file} is empty. Download or copy it again.")


def unfinished_download(folder: Path) -> str:
    """Return a sentence on a file of which the hub's client has a part only, for the messages of errors; empty without
    any.
    """
    # The client keeps parts in the folder itself (--local-dir), or next to all snapshots of its cache.
    places = [folder / ".cache/huggingface/download"]
    if folder.absolute().parent.name == "snapshots":
        places.append(folder.absolute().parents[1] / "blobs")
    parts = sorted(part for place in places for part in place.rglob("*.incomplete"))
    return f" Its download is unfinished ({parts[0]}): `hf download` goes on with it." if parts else ""


def snapshot_in(folder: Path) -> Path | None:
    """Return the snapshot of a model in the hub's cache, from its folder `models--...`: the main branch's, or the only
    snapshot; None if `folder` is no such folder, or has several snapshots and no main branch.
    """
    snapshots = folder / "snapshots"
    if not snapshots.is_dir() or (folder / "config.json").exists():
        return None
    main = folder / "refs/main"
    named = snapshots / main.read_text(encoding="utf-8").strip() if main.is_file() else None
    there = list(snapshots.iterdir())
    return named if named in there else there[0] if len(there) == 1 else None


def hub_cache_fault(folder: Path) -> str | None:
    """Return the fault of a folder of the hub's cache that has its files further down; None for any other folder."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir() or (folder / "config.json").exists():
        return None
    there = sorted(str(path) for path in snapshots.iterdir())
    name = there[0] if len(there) == 1 else f"a folder in {snapshots}"
    return f"{folder} is a folder of the Hugging Face cache, whose files are in snapshots: name {name}"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder. Raises CheckpointError if it is missing or not a JSON object."""
    if (fault := hub_cache_fault(folder)) is not None:
        raise CheckpointError(f"{fault}.")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder}/config.json is no JSON object. Take the config.json that belongs to the weights."
        )
    return config


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is Git's pointer to a file that Git LFS stores."""
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER
