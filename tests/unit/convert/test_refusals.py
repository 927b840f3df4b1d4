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
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import weight_map
from mcore_rl.storage.checkpoint import check
from tests.conversion import assert_same, changed, differing, exported, imported, read_hf, saved, with_mtp, write_hf
from tests.hf_models import oracle
from tests.unit.convert.conftest import Converted
from tests.unit.convert.test_fp8 import model as fp8_model
from tests.unit.convert.test_int4 import INT4 as INT4_SETTINGS
from tests.unit.convert.test_int4 import WEIGHTS as INT4_WEIGHTS
from tests.unit.convert.test_int4 import model as int4_model
from tests.unit.convert.test_mxfp4 import model as mxfp4_model
from tests.unit.convert.test_shells import kimi

INDEX, SECOND = "model.safetensors.index.json", "model-00002-of-00003.safetensors"
WEIGHTS = "__0_0.distcp"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.experts.3.up_proj.weight"
HEAD, TOP = "lm_head.weight", "model.layers.3.shared_head.head.weight"
FP8, INT4 = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"
MXFP4 = "model.layers.0.mlp.experts.gate_up_proj"
NO_HYBRID = "no layout of Megatron's HybridModel is known:\n  "
NO_INT4 = r"int4 in blocks of 32 \(pack-quantized, symmetric\) are read here"
MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "fp8": fp8_model,
    "int4": int4_model,
    "mxfp4": mxfp4_model,
    "kimi_k25": kimi,
    "mtp": with_mtp,
}
"""Models besides those of tests/hf_models.py: config.json and the tensors come first."""
Edit = Callable[[Path], object]


def rewritten(change: Callable[[bytes], bytes], name: str = SECOND) -> Edit:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def again(name: str, key: str, value: object) -> Edit:
    """Write a key a second time, with another value, before the same key in an object of a JSON file."""
    entry, second = f'"{key}":'.encode(), f'"{key}": {json.dumps(value)}, "{key}":'.encode()
    return rewritten(lambda data: data.replace(entry, second, 1), name)


def twice_in_its_header(data: bytes) -> bytes:
    """Repeat the first tensor of a shard's header."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    text = f"{{{json.dumps(name)}: {json.dumps(header[name])}, ".encode() + data[9 : 8 + length]
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def headed(**first: object) -> Edit:
    """Write other entries of a shard's first tensor into its header, before the same bytes."""

    def change(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        next(entry for name, entry in header.items() if name != "__metadata__").update(first)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return rewritten(change)


def indexed(name: str, file: str) -> Edit:
    def change(data: bytes) -> bytes:
        index = json.loads(data)
        index["weight_map"][name] = file
        return json.dumps(index).encode()

    return rewritten(change, INDEX)


def without(*patterns: str) -> Edit:
    return lambda folder: [file.unlink() for pattern in patterns for file in folder.glob(pattern)]


def added(name: str, text: str = "") -> Edit:
    return lambda folder: (folder / name).write_text(text)


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def of_mistral(folder: Path) -> None:
    save_file({"norm.weight": torch.ones(48)}, folder / "consolidated.safetensors")


def as_hub_cache(folder: Path) -> None:
    """Make a folder what the hub's cache has for a model: files in a snapshot, under the name of its commit."""
    files = list(folder.iterdir())
    (folder / "snapshots/0a1b2c").mkdir(parents=True)
    for file in files:
        file.rename(folder / "snapshots/0a1b2c" / file.name)


def as_pipe(folder: Path, name: str = SECOND) -> None:
    """Put a pipe in a file's place, from which a reader would wait for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)


def with_metadata(data: bytes) -> Edit:
    return lambda checkpoint: (checkpoint / ".metadata").write_bytes(data)


def quantized_as(settings: object) -> dict[str, Any]:
    return {"config.json": {"quantization_config": settings}}


def int4_of(**weights: object) -> dict[str, Any]:
    return quantized_as(INT4_SETTINGS | {"config_groups": {"group_0": {"weights": INT4_WEIGHTS | weights}}})


LORA = '{"peft_type": "LORA", "base_model_name_or_path": "wolf"}'
TWO_COUNTS = {"num_nextn_predict_layers": 1, "num_mtp_layers": 1}
GPTQ = fp8_model()[0] | {"quantization_config": {"quant_method": "gptq"}}
REFUSED: list[tuple[str, Edit | dict[str, Any], str]] = [
    ("qwen3_moe", rewritten(lambda data: data[:-3]), "it is cut off"),
    ("qwen3_moe", rewritten(lambda data: data[:30]), "does not begin as"),
    ("qwen3_moe", rewritten(lambda data: b""), "does not begin as"),
    ("qwen3_moe", rewritten(lambda data: struct.pack("<Q", 5 * 10**6) + b'{"a":' * 10**6), "does not begin as safeten"),
    ("qwen3_moe", rewritten(lambda data: data + b"x"), "it is too long"),
    ("qwen3_moe", added(SECOND, LFS), "pointer of Git LFS, without the content"),
    ("qwen3_moe", headed(shape=[2, 2, 2, 2, 2]), "its range is"),
    ("qwen3_moe", headed(dtype="BF16"), "its range is"),
    ("qwen3_moe", headed(dtype="F4"), "a type that is not"),
    ("qwen3_moe", without(SECOND), f"names files that are not there:\n  {SECOND}"),
    ("qwen3_moe", without(SECOND, INDEX), f"lacks shards:\n  {SECOND}"),
    ("qwen3_moe", indexed("model.more", SECOND), f"model.more is not in {SECOND}"),
    ("qwen3_moe", indexed("a", "../a.safetensors"), "not a file of its folder"),
    ("qwen3_moe", as_pipe, "names files that are not there"),
    ("qwen3_moe", both(as_pipe, without(INDEX)), f"{SECOND} is no regular file"),
    ("qwen3_moe", added("config.json", "[" * 10**6), "is not JSON"),
    ("qwen3_moe", added("config.json", LFS), "config.json holds no data. It is a pointer of Git LFS"),
    ("qwen3_moe", added("tokenizer.json", LFS), "tokenizer.json holds no data. It is a pointer of Git LFS"),
    ("qwen3_moe", added("tokenizer.model", LFS), "tokenizer.model holds no data. It is a pointer of Git LFS"),
    ("qwen3_moe", again("config.json", "head_dim", 12), "has head_dim twice in one object, as 12 and as 24"),
    ("qwen3_moe", again("config.json", "rope_theta", 3), "has rope_theta twice in one object, as 3 and as 10000.0"),
    ("qwen3_moe", again(INDEX, HEAD, "x"), f"{INDEX} has {HEAD} twice in one object"),
    ("qwen3_moe", rewritten(twice_in_its_header), f"{SECOND} has .* twice in one object"),
    ("qwen3_moe", without("config.json"), "no config.json"),
    ("qwen3_moe", added("adapter_config.json", LORA), r"has an adapter \(adapter_config.json: LORA on wolf\)"),
    ("qwen3_moe", as_hub_cache, "hf is a folder of the Hugging Face cache.* name .*hf/snapshots/0a1b2c"),
    ("qwen3_moe", both(without(INDEX), of_mistral), "consolidated.safetensors has weights.* Mistral's.* Move it away"),
    ("qwen3_moe", both(without("model*"), of_mistral), r"Mistral's own programs.* Take the files model\*.safetensors"),
    ("qwen3_moe", both(without("model*"), added("pytorch_model.bin")), "save it as safetensors first"),
    ("qwen3_moe", lambda folder: folder.rename(folder.with_name("moved")), "hf is no folder"),
    ("qwen3_moe", {"config.json": {"model_type": "x"}}, "model_type='x'"),
    ("qwen3_moe", {NORM: None}, rf"{NORM} \(48,\) is missing"),
    ("qwen3_moe", {"model.mystery": torch.ones(3)}, "model.mystery .* belongs to nothing"),
    ("qwen3_moe", {UP: torch.ones(24, 47)}, rf"{UP} has shape \(24, 47\)"),
    ("qwen3_moe", {UP: Tensor.bfloat16}, r"of the types torch.bfloat16, torch.float32"),
    ("llama", {NORM: Tensor.int}, f"{NORM} is torch.int32, wanted fp64"),
    ("llama", {HEAD: None}, r"lm_head.weight \(99, 48\) is missing"),
    ("qwen3", {HEAD: torch.ones(99, 48)}, "lm_head.weight differs from model.embed_tokens.weight"),
    ("deepseek_v3", {"config.json": TWO_COUNTS}, r"no tensor model\.layers\.3\.\*.*--mtp drop"),
    ("mtp", {TOP: torch.zeros(99, 48)}, "shared_head.head.weight differs from lm_head.weight"),
    ("kimi_k25", {"audio_tower.weight": torch.ones(3)}, r"audio_tower.weight \(3,\) belongs to nothing"),
    ("kimi_k25", {"config.json": {"text_config": GPTQ}}, "quantization_config .*'gptq'"),
    ("qwen3_moe", quantized_as(3), "quantization_config=3; wanted an object"),
    ("qwen3_moe", quantized_as({"quant_method": "fp8", "weight_block_size": [128]}), "Only fp8"),
    ("fp8", quantized_as({"quant_method": "gptq"}), "Only fp8"),
    ("fp8", {FP8 + "_scale_inv": None}, "_scale_inv is missing"),
    ("fp8", {FP8 + "_scale_inv": torch.ones(2, 2)}, r"weight_scale_inv is torch.float32 \(2, 2\), wanted \(1, 2\)"),
    ("fp8", {FP8 + "_scale_inv": Tensor.half}, "weight_scale_inv is torch.float16"),
    ("fp8", {FP8 + "_scale_inv": Tensor.byte}, "weight_scale_inv is torch.uint8"),
    ("fp8", {FP8: Tensor.bfloat16}, "yet has scales"),
    ("fp8", {"model.x_scale_inv": torch.ones(1)}, "model.x_scale_inv .* belongs to nothing"),
    ("int4", {INT4 + "_scale": None}, "has no .*down_proj.weight_scale"),
    ("int4", {INT4 + "_scale": lambda x: x[:, :1]}, r"weight_scale is torch.bfloat16 \(96, 1\), wanted \(96, 2\)"),
    ("int4", {INT4 + "_zero_point": torch.zeros(12, 2).int()}, "weight_zero_point .* belongs to nothing"),
    ("int4", {INT4 + "_packed": lambda packed: packed[:, :5]}, r"has shape \(96, 40\), the model wants \(96, 64\)"),
    ("int4", {INT4: torch.zeros(96, 64)}, "is there, and as"),
    ("int4", quantized_as(INT4_SETTINGS | {"format": "nvfp4-pack-quantized"}), NO_INT4),
    ("int4", quantized_as(INT4_SETTINGS | {"config_groups": {}}), NO_INT4),
    ("int4", int4_of(num_bits=8), NO_INT4),
    ("int4", int4_of(group_size=128), NO_INT4),
    ("int4", int4_of(symmetric=False), NO_INT4),
    ("int4", int4_of(actorder="group"), NO_INT4),
    ("mxfp4", {MXFP4 + "_scales": None}, "has no .*gate_up_proj_scales"),
    ("mxfp4", {MXFP4 + "_scales": lambda x: x[:, :, :1]}, r"_scales is .*uint8 \(6, 128, 1\), wanted .* \(6, 128, 3\)"),
    ("mxfp4", {MXFP4 + "_blocks": None}, "gate_up_proj_scales .* belongs to nothing"),
    ("mxfp4", {MXFP4: torch.zeros(6, 96, 128)}, "is there, and as"),
    ("deepseek_v3", {"--layers": "hybrid"}, NO_HYBRID + "latent attention"),
    ("qwen3_next", {"--layers": "hybrid"}, NO_HYBRID + "gated delta nets"),
    ("olmoe", {"--layers": "hybrid"}, NO_HYBRID + "norms of queries and keys over all heads"),
    ("gpt_oss", {"--layers": "hybrid"}, NO_HYBRID + "windows in every second layer"),
    ("llama-llama3", {"--layers": "hybrid"}, NO_HYBRID + 'model.rope.scaling="llama3"'),
    ("mtp", {"--layers": "hybrid"}, "MTP layers.*--mtp drop leaves them out"),
]
"""A model; an edit of its folder, or changes of tensors as in `changed`, of "config.json" or options; the message."""


@pytest.mark.parametrize(("model", "change", "message"), REFUSED, ids=[f"{m}-{error}" for m, _, error in REFUSED])
def test_an_input_that_cannot_be_converted_is_refused_before_anything_is_written(
    model: str, change: Edit | dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, tensors, *_ = MODELS[model]() if model in MODELS else (oracle(model).config, oracle(model).tensors)
    changes = {} if callable(change) else change
    options = {name.removeprefix("--"): value for name, value in changes.items() if name.startswith("--")}
    names = changes.keys() - {"config.json"} - {f"--{name}" for name in options}
    tensors = changed(tensors, {name: changes[name] for name in names})
    source = write_hf(tmp_path / "hf", config | changes.get("config.json", {}), tensors, shards=3)
    if callable(change):
        change(source)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        imported(source, tmp_path / "ckpt", **options)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.full
def test_mtp_layers_are_kept_or_dropped(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", *with_mtp())
    kept = imported(source, tmp_path / "kept")
    assert differing(source, kept) == []
    assert differing(source, exported(kept, tmp_path / "back", reference=source)) == []
    dropped = imported(source, tmp_path / "dropped", mtp="drop")
    assert not [key for key in open_dist(dropped).tensors if key.startswith("mtp.")]
    plain = saved("deepseek_v3", tmp_path / "plain")
    assert differing(dropped, plain) == []
    thin = exported(kept, tmp_path / "thin", reference=source, mtp="drop")
    assert json.loads((thin / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert differing(thin, plain) == []


@pytest.mark.full
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
    """Creates a file in the current folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("boom", "w")


@pytest.fixture
def unmarked(converted: Converted, tmp_path: Path) -> Path:
    """A checkpoint without a marker and the checksums in it, which whoever writes a program can leave out."""
    checkpoint = Path(shutil.copytree(converted("llama")[1], tmp_path / "foreign"))
    (checkpoint / "checkpoint.json").unlink()
    return checkpoint


DAMAGED: dict[str, tuple[Edit, str]] = {
    "a program": (with_metadata(pickle.dumps(Boom())), r"asks for (_?io|builtins)\.open"),
    "a length beyond all memory": (
        with_metadata(pickle.PROTO + b"\x04" + pickle.BINUNICODE8 + struct.pack("<Q", 2**62) + b"x"),
        r"\.metadata",
    ),
    "an index beyond all memory": (
        with_metadata(pickle.EMPTY_LIST + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1) + pickle.STOP),
        r"\.metadata",
    ),
    "a pipe": (lambda folder: as_pipe(folder, ".metadata"), r"\.metadata is no regular file"),
    "weights cut off": (rewritten(lambda data: data[:-10], WEIGHTS), rf"{WEIGHTS} has \d+ bytes, \d+ are in use"),
    "no weights": (without(WEIGHTS), f"{WEIGHTS} has 0 bytes"),
    "no format": (without("metadata.json"), "not a complete checkpoint"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_checkpoints_are_refused_and_no_program_is_run(fault: str, unmarked: Path) -> None:
    edit, message = DAMAGED[fault]
    edit(unmarked)
    with pytest.raises(CheckpointError, match=message):
        open_dist(unmarked)
    assert not Path("boom").exists()


def test_unknown_classes_in_the_common_state_are_not_imported(unmarked: Path) -> None:
    torch.save({"iteration": 7, "args": Namespace(layers=2), "x": Boom()}, unmarked / "common.pt")
    assert open_dist(unmarked).step == 7
    assert not Path("boom").exists()


def test_a_tensor_of_a_checkpoint_that_is_a_program_is_refused(tmp_path: Path) -> None:
    checkpoint = imported(saved("llama", tmp_path / "hf"), tmp_path / "ckpt")
    file = checkpoint / WEIGHTS
    size = file.stat().st_size
    buffer = io.BytesIO()
    torch.save(Boom(), buffer)
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
    (checkpoint / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"does not begin as an archive"):
        exported(checkpoint, tmp_path / "out", reference=tmp_path / "hf")
    assert not (tmp_path / "boom").exists() and not (tmp_path / "out").exists()
