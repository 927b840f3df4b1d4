"""The files of a Hugging Face folder: its tensors by the headers of its safetensors, and its small files."""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from mcore_rl.data.chat_template import MORE_TEMPLATES
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import Shape, listed
from mcore_rl.storage import files as stored
from mcore_rl.storage import folders
from mcore_rl.storage.checkpoint import FORMAT_FILE, MANIFEST, MARKER

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_FILES = (
    "adapter_config.json",
    ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
)
"""Files of an adapter (of the library peft) with or without a model's weights."""
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor in a safetensors file."""

    file: str
    dtype: torch.dtype
    shape: Shape
    start: int
    """Byte of the file at which its elements begin."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFolder:
    """A folder of safetensors with its config.json; other files in it are not read by this class."""

    path: Path
    config: dict[str, Any] | None
    """Content of config.json; None if the file does not exist."""
    tensors: dict[str, HfTensor]
    files: dict[str, int]
    """Number of bytes of each file, by name."""
    headers: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file's header, by name."""
    stamps: dict[Path, tuple[int, int]]
    """Size and time of each file and of config.json, from before they were read."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of all tensors, by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def open_hf(path: Path) -> HfFolder:
    """Return the tensors of a folder or file. Raises CheckpointError for missing, truncated or inconsistent files."""
    folder = path if path.is_dir() else path.parent
    stored.refuse_absent_content(path)
    files = [path.name] if path.is_file() else _files(path)
    # transformers would load the adapter's base and apply the adapter; we would ignore or misread its tensors.
    if adapter := [name for name in ADAPTER_FILES if (folder / name).exists()]:
        read = folders.read_json(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else {}
        known = read if isinstance(read, dict) else {}
        kind, base = known.get("peft_type", "an unknown kind"), known.get("base_model_name_or_path")
        raise CheckpointError(
            f"{folder} has an adapter ({adapter[0]}: {kind}{f' on {base}' if base else ''}), which changes what the "
            "model computes, and is not merged here. Merge it first (peft: model.merge_and_unload(), then "
            "save_pretrained), or move its files away to convert the model without it."
        )
    stamps = stored.sizes_and_times(folder / name for name in (*files, "config.json"))
    config = folders.read_config(folder) if (folder / "config.json").is_file() else None
    if path.is_dir():
        _refuse_other_weights(path, files, config or {})
    tensors: dict[str, HfTensor] = {}
    sizes, headers = {}, {}
    for name in files:
        header, data_start, sizes[name], headers[name] = _header(folder / name)
        for tensor_name, tensor in _entries(folder / name, header, data_start, sizes[name]):
            if tensor_name in tensors:
                raise CheckpointError(
                    f"{folder}: {tensor_name} is in {tensors[tensor_name].file} and in {name}. Remove the wrong one."
                )
            tensors[tensor_name] = tensor
    if path.is_dir() and (path / INDEX).is_file():
        _check_index(path, tensors)
    return HfFolder(path=folder, config=config, tensors=tensors, files=sizes, headers=headers, stamps=stamps)


def _refuse_other_weights(folder: Path, files: Sequence[str], config: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if transformers loads other files of a folder than `files`."""
    named = str(config.get("transformers_weights") or SINGLE)
    order = (named, SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
    loaded = next((name for name in order if (folder / name).is_file()), INDEX)
    if loaded != INDEX and files != [loaded]:
        raise CheckpointError(
            f"{folder} has more than one set of weights: transformers loads {loaded} alone, the other files are\n"
            f"{listed(sorted({*files} - {loaded}))}\nMove those away that are not the model's."
        )


def _files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(
                f"{folder}/{INDEX} names files that are not there:\n{listed(missing)}\nDownload or copy them again."
                f"{stored.unfinished_download(folder)}"
            )
        return names
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder. A model of the Hugging Face hub is downloaded first (hf download)."
        )
    if (fault := folders.hub_cache_fault(folder)) is not None:
        raise CheckpointError(f"{fault}.")
    if not (found := sorted(file.name for file in folder.glob("*.safetensors"))):
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        hint = f" Its {pickled[0]} is a pickle: save it as safetensors first." if pickled else ""
        raise CheckpointError(f"{folder} has no *.safetensors.{hint}{stored.unfinished_download(folder)}")
    # Without an index, the numbers in the names are the only sign of a missing shard.
    for name in found:
        match = SHARD.fullmatch(name)
        wanted = [f"{match[1]}-{i:05d}-of-{match[3]}.safetensors" for i in range(1, int(match[3]) + 1)] if match else []
        if missing := sorted(set(wanted) - set(found)):
            raise CheckpointError(
                f"{folder} lacks shards:\n{listed(missing)}\nDownload or copy them again."
                f"{stored.unfinished_download(folder)}"
            )
    return found


def _weight_map(folder: Path) -> Mapping[str, str]:
    index = folders.read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{folder}/{INDEX} has no weight_map of names to files. Take another copy.")
    if outside := [file for file in names.values() if Path(file).name != file]:
        raise CheckpointError(f"{folder}/{INDEX} names {outside[0]}, which is not a file of its folder.")
    return names


def _check_index(folder: Path, tensors: Mapping[str, HfTensor]) -> None:
    names = _weight_map(folder)
    faults = [f"{name} is not in {names[name]}" for name in sorted(names.keys() - tensors.keys())]
    faults += [
        f"{name}, in {tensors[name].file}, is not in the index" for name in sorted(tensors.keys() - names.keys())
    ]
    faults += [
        f"{name} is in {tensors[name].file}, not in {names[name]}"
        for name in sorted(names.keys() & tensors.keys())
        if tensors[name].file != names[name]
    ]
    if faults:
        raise CheckpointError(
            f"{folder}/{INDEX} is not that of the files:\n{listed(faults)}\nTake index and files from one place."
        )


def _header(file: Path) -> tuple[dict[str, Any], int, int, str]:
    """Return a file's header, the byte at which its data begins, its size, and the header's SHA-256."""
    folders.refuse_special_file(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            # The length of the header, a little-endian number of 8 bytes; shorter files are refused below.
            length = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))[0]
            raw = opened.read(length) if size >= 8 and length <= min(MAX_HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}. Let this user read it, or take another copy."
        ) from error
    try:
        header = json.loads(raw, object_pairs_hook=partial(folders.once_each, file))
    except folders.NOT_JSON:
        header = None
    if not isinstance(header, dict):
        remedy = stored.POINTER_REMEDY if stored.is_lfs_pointer(file) else "Download or copy it again."
        raise CheckpointError(f"{file} ({size} bytes) does not begin as safetensors do. {remedy}")
    header.pop("__metadata__", None)
    return header, 8 + length, size, sha256(raw).hexdigest()


def _entries(file: Path, header: Mapping[str, Any], data_start: int, size: int) -> Iterator[tuple[str, HfTensor]]:
    """Yield a file's tensors; CheckpointError unless they fill its data without gaps, as the format demands."""
    position = 0
    try:
        entries = sorted(header.items(), key=lambda entry: tuple(entry[1]["data_offsets"]))
        for name, entry in entries:
            start, stop = entry["data_offsets"]
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                raise CheckpointError(f"{file}: {name} is {entry['dtype']}, a type that is not read here.")
            tensor = HfTensor(file.name, dtype, tuple(map(int, entry["shape"])), data_start + start)
            if start != position or stop - start != tensor.num_bytes:
                raise CheckpointError(
                    f"{file}: {name} {tensor.shape} {entry['dtype']} takes {tensor.num_bytes} bytes, its range is "
                    f"{start}:{stop} after {position}. Download or copy the file again."
                )
            position = stop
            yield name, tensor
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{file} has a header that is not of safetensors ({error}).") from error
    if data_start + position != size:
        raise CheckpointError(
            f"{file} has {size} bytes, its header describes {data_start + position}: it is "
            f"{'cut off' if size < data_start + position else 'too long'}. Download or copy it again."
        )


CARD = "README.md"
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of ModelOpt, GPTQ and AWQ by which engines read the weights as quantized."""
NOT_COPIED = (MANIFEST, MARKER, FORMAT_FILE, CARD, *ADAPTER_FILES, *QUANTIZATION_FILES)
"""Files that belong to the weights of their folder: a copy has its own, or has them merged."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
"""Endings of files that are not copied."""


def small_files(folder: Path) -> dict[str, Path]:
    """Return the files that a conversion copies, by name; CheckpointError for one that is cut off."""
    found = {
        str(file.relative_to(folder)): file
        for file in (*sorted(folder.iterdir()), *sorted(folder.glob(f"{MORE_TEMPLATES}/*.jinja")))
        if file.is_file()
        and not file.name.startswith(".")
        and not (file.name.endswith(WEIGHT_FILES) or file.name in NOT_COPIED)
    }
    stored.refuse_absent_content(folder)
    for file in found.values():
        folders.refuse_cut_off(file)
    return found


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into an output, by their names in it."""
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(file.read_bytes())
