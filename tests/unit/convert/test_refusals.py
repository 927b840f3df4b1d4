"""Inputs that cannot be converted are refused by name before anything is written, and no foreign code is run."""

import io
import json
import os
import pickle
import shutil
import struct
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.hf.folder import open_hf
from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import weight_map
from mcore_rl.storage.checkpoint import check
from tests.conversion import assert_same, differing, exported, imported, read_hf, saved, with_mtp, write_hf
from tests.hf_models import Tensors, oracle
from tests.unit.convert.conftest import Converted

NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.experts.3.up_proj.weight"
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


def edit_header(file: Path, change: Callable[[dict], object]) -> None:
    """Write another header before the same bytes."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_json(file: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def first(header: dict) -> dict:
    return next(entry for name, entry in header.items() if name != "__metadata__")


BROKEN_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-3]), "it is cut off"),
    "cut off in the header": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:30]), "does not begin as"),
    "empty": (lambda f: (f / SECOND).write_bytes(b""), "does not begin as"),
    "too long": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes() + b"x"), "it is too long"),
    "missing shard": (lambda f: (f / SECOND).unlink(), f"names files that are not there:\n  {SECOND}"),
    "missing shard without an index": (
        lambda f: ((f / SECOND).unlink(), (f / INDEX).unlink()),
        f"lacks shards:\n  {SECOND}",
    ),
    "index of another tensor": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({"model.more": SECOND})),
        f"model.more is not in {SECOND}",
    ),
    "index outside": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({"a": "../a.safetensors"})),
        "not a file of its folder",
    ),
    "shape that does not fit its bytes": (
        lambda f: edit_header(f / SECOND, lambda h: first(h)["shape"].append(2)),
        "its range is",
    ),
    "type that does not fit its bytes": (
        lambda f: edit_header(f / SECOND, lambda h: first(h).update(dtype="BF16")),
        "its range is",
    ),
    "unknown type": (lambda f: edit_header(f / SECOND, lambda h: first(h).update(dtype="F4")), "a type that is not"),
    "nested without end": (lambda f: nested_header(f / SECOND), "does not begin as safetensors do"),
    "a pipe": (lambda f: as_pipe(f / SECOND), "names files that are not there"),
    "a pipe without an index": (lambda f: ((f / INDEX).unlink(), as_pipe(f / SECOND)), f"{SECOND} is no regular file"),
    "a config nested without end": (lambda f: (f / "config.json").write_text("[" * 10**6), "is not JSON"),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "wolf"}'),
        r"has an adapter \(adapter_config.json: LORA on wolf\)",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "pointer of Git LFS, without the content",
    ),
    "a config that is a pointer of Git LFS": (
        lambda f: (f / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "config.json is not JSON.*pointer of Git LFS",
    ),
    "a quantization that is no object": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(quantization_config=3)),
        "quantization_config=3; wanted an object",
    ),
    "blocks of a quantization that are no sizes": (
        lambda f: edit_json(
            f / "config.json",
            lambda c: c.update(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
        ),
        "Only fp8",
    ),
    "a folder of the hub's cache": (
        lambda f: as_hub_cache(f),
        "hf is a folder of the Hugging Face cache.* name .*hf/snapshots/0a1b2c",
    ),
    "Mistral's own files beside those of the hub": (
        lambda f: ((f / INDEX).unlink(), save_file({"norm.weight": torch.ones(48)}, f / "consolidated.safetensors")),
        "consolidated.safetensors has weights under the names of Mistral's own programs.* Move it away",
    ),
    "Mistral's own files alone": (
        lambda f: (
            [file.unlink() for file in f.glob("model*")],
            save_file({"norm.weight": torch.ones(48)}, f / "consolidated.safetensors"),
        ),
        r"names of Mistral's own programs.* Take the files model\*.safetensors",
    ),
    "no folder": (lambda f: f.rename(f.with_name("moved")), "hf is no folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "unknown family": (lambda f: edit_json(f / "config.json", lambda c: c.update(model_type="x")), "model_type='x'"),
}


def nested_header(file: Path) -> None:
    """Write a header that no parser gets to the end of."""
    text = b'{"a":' * 10**6
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def as_hub_cache(folder: Path) -> None:
    """Make a folder what the hub's cache has for a model: files in a snapshot, under the name of its commit."""
    files = list(folder.iterdir())
    (folder / "snapshots/0a1b2c").mkdir(parents=True)
    for file in files:
        file.rename(folder / "snapshots/0a1b2c" / file.name)


def as_pipe(file: Path) -> None:
    """Put a pipe in the file's place, from which a reader would wait for ever."""
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("fault", BROKEN_FILES)
def test_broken_files_are_refused_before_anything_is_written(fault: str, tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path / "hf")
    change, message = BROKEN_FILES[fault]
    change(source)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        imported(source, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


WRONG_TENSORS: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "dropped": ("qwen3_moe", lambda t: {k: v for k, v in t.items() if k != NORM}, rf"{NORM} \(48,\) is missing"),
    "left over": ("qwen3_moe", lambda t: t | {"model.mystery": torch.ones(3)}, "model.mystery .* belongs to nothing"),
    "another shape": ("qwen3_moe", lambda t: t | {UP: torch.ones(24, 47)}, rf"{UP} has shape \(24, 47\)"),
    "another type": ("qwen3_moe", lambda t: t | {UP: t[UP].bfloat16()}, r"of the types torch.bfloat16, torch.float32"),
    "integers": ("llama", lambda t: t | {NORM: t[NORM].int()}, f"{NORM} is torch.int32, wanted fp64"),
    "no output": (
        "llama",
        lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"},
        r"lm_head.weight \(99, 48\) is missing",
    ),
    "an output that is not tied": (
        "qwen3",
        lambda t: t | {"lm_head.weight": torch.ones(99, 48)},
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("fault", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    case, change, message = WRONG_TENSORS[fault]
    theirs = oracle(case)
    source = write_hf(tmp_path / "hf", theirs.config, change(theirs.tensors))
    with pytest.raises(CheckpointError, match=message):
        imported(source, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_mtp_layers_are_kept_dropped_or_missed(tmp_path: Path) -> None:
    theirs, (config, tensors) = oracle("deepseek_v3"), with_mtp()
    source = write_hf(tmp_path / "hf", config, tensors)
    without = write_hf(tmp_path / "without", config, theirs.tensors)
    kept = imported(source, tmp_path / "kept")
    assert differing(source, kept) == []
    assert differing(source, exported(kept, tmp_path / "back", reference=source)) == []
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.3\.\*.*--mtp drop"):
        imported(without, tmp_path / "ckpt")
    dropped = imported(source, tmp_path / "dropped", mtp="drop")
    assert not [key for key in open_dist(dropped).tensors if key.startswith("mtp.")]
    plain = saved("deepseek_v3", tmp_path / "plain")
    assert differing(dropped, plain) == []
    thin = exported(kept, tmp_path / "thin", reference=source, mtp="drop")
    assert json.loads((thin / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert differing(thin, plain) == []
    head = {"model.layers.3.shared_head.head.weight": torch.zeros(99, 48)}
    other = write_hf(tmp_path / "other", config, tensors | head)
    with pytest.raises(CheckpointError, match=r"shared_head.head.weight differs from lm_head.weight"):
        imported(other, tmp_path / "ckpt")


@pytest.mark.parametrize("counts", [{}, {"mtp_num_hidden_layers": 1}], ids=["not counted", "counted"])
def test_the_mtp_layer_of_qwen3_next_is_kept_or_dropped_whether_config_json_counts_it(
    counts: dict[str, int], tmp_path: Path
) -> None:
    theirs = oracle("qwen3_next")
    shapes = weight_map(theirs.ours.model_copy(update={"mtp_layers": 1})).hf_shapes
    mtp = {name: torch.rand(shape) for name, shape in shapes.items() if name.startswith("mtp.")}
    assert len(mtp) == 4 + 2 + 6 + 3 * 8 + 5  # around, norms, attention, experts, router and shared expert
    each = read_hf(exported(imported(saved("qwen3_next", tmp_path / "plain"), tmp_path / "one"), tmp_path / "each"))
    source = write_hf(tmp_path / "hf", theirs.config | counts, each | mtp)
    kept = imported(source, tmp_path / "kept")
    assert check(kept).model["mtp_layers"] == 1
    again = exported(kept, tmp_path / "back", reference=source)
    assert_same(read_hf(again), each | mtp)
    assert (again / "config.json").read_bytes() == (source / "config.json").read_bytes()
    dropped = imported(source, tmp_path / "dropped", mtp="drop")
    assert not [key for key in open_dist(dropped).tensors if key.startswith("mtp.")]
    thin = exported(kept, tmp_path / "thin", reference=source, mtp="drop")
    assert_same(read_hf(thin), each)
    assert json.loads((thin / "config.json").read_text()).get("mtp_num_hidden_layers", 0) == 0


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved("llama", tmp_path / "hf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="but only 1000 bytes are free"):
        imported(source, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_too_little_memory_is_refused_and_little_memory_takes_fewer_workers(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is too little: one worker needs"):
        imported(source, tmp_path / "ckpt", CopySettings(max_ram_bytes=100 << 20))
    assert imported(source, tmp_path / "ckpt", CopySettings(workers=64, max_ram_bytes=2 << 30)).exists()


class Boom:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.file, "w")


def test_a_pickle_that_asks_for_a_program_is_refused_and_not_run(tmp_path: Path) -> None:
    checkpoint = imported(saved("llama", tmp_path / "hf"), tmp_path / "ckpt")
    (checkpoint / "checkpoint.json").unlink()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Boom(tmp_path / "boom")))
    with pytest.raises(CheckpointError, match=r"asks for (_?io|builtins)\.open"):
        open_dist(checkpoint)
    assert not (tmp_path / "boom").exists()


def test_unknown_classes_in_the_common_state_are_not_imported(tmp_path: Path) -> None:
    checkpoint = imported(saved("llama", tmp_path / "hf"), tmp_path / "ckpt")
    (checkpoint / "checkpoint.json").unlink()
    foreign = tmp_path / "foreign"
    shutil.copytree(checkpoint, foreign)
    common = {"iteration": 7, "args": Namespace(layers=2), "x": Boom(tmp_path / "boom")}
    torch.save(common, foreign / "common.pt")
    assert open_dist(foreign).step == 7
    assert not (tmp_path / "boom").exists()


def test_a_tensor_of_a_checkpoint_that_is_a_program_is_refused(tmp_path: Path) -> None:
    checkpoint = imported(saved("llama", tmp_path / "hf"), tmp_path / "ckpt")
    file = checkpoint / "__0_0.distcp"
    size = file.stat().st_size
    buffer = io.BytesIO()
    torch.save(Boom(tmp_path / "boom"), buffer)
    data = bytearray(file.read_bytes())
    place = next(iter(open_dist(checkpoint).tensors["embedding.word_embeddings.weight"].parts)).saved
    evil = buffer.getvalue()
    assert len(evil) <= place.length
    # Zip files are read from their end.
    data[place.start : place.start + place.length] = evil.rjust(place.length, b"\0")
    file.write_bytes(data)
    assert file.stat().st_size == size
    with pytest.raises(CheckpointError, match="is not the file that was written"):
        exported(checkpoint, tmp_path / "out")
    # Whoever writes a program can leave out the checksums of files.
    (checkpoint / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"does not begin as an archive"):
        exported(checkpoint, tmp_path / "out", reference=tmp_path / "hf")
    assert not (tmp_path / "boom").exists() and not (tmp_path / "out").exists()


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    checkpoint = imported(saved("llama", tmp_path / "hf"), tmp_path / "ckpt")
    (checkpoint / "checkpoint.json").unlink()
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has \d+ bytes, \d+ are in use"):
        open_dist(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has 0 bytes"):
        open_dist(checkpoint)
    (checkpoint / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        open_dist(checkpoint)


CRAFTED = {
    "a length beyond all memory": pickle.PROTO + b"\x04" + pickle.BINUNICODE8 + struct.pack("<Q", 2**62) + b"x",
    "an index beyond all memory": pickle.EMPTY_LIST + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1) + pickle.STOP,
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_metadata_is_a_damaged_checkpoint(what: str, converted: Converted, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(converted("llama")[1], tmp_path / "iter_0000000"))
    (checkpoint / "checkpoint.json").unlink()
    (checkpoint / ".metadata").write_bytes(CRAFTED[what])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        open_dist(checkpoint)
    (checkpoint / ".metadata").unlink()
    os.mkfifo(checkpoint / ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata is no regular file"):
        open_dist(checkpoint)


def test_pickled_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="save it as safetensors first"):
        open_hf(tmp_path)
