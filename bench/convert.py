"""Time and memory of converting a synthetic MoE checkpoint, against copying the same bytes on the same disk.

    python bench/convert.py --size 20G --folder /tmp/convert_bench --workers 2

In one run: make the checkpoint, copy it, import it, export it, compare both ends, delete all. The page cache is written
back before each measurement; where the checkpoint is larger than memory, every step reads from the disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.copying.manifest import MANIFEST
from mcore_rl.convert.copying.progress import ByteProgress
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.convert.importing import ImportOptions, plan_import
from mcore_rl.families import hf_config, weight_map
from mcore_rl.run.commands import num_bytes

GIB = 2**30
SHARD_BYTES = 2 * GIB


def model_of(size: int):
    """Qwen3-MoE in the widths of the 30B model, with as many layers as make `size` bytes in bf16."""

    def of(num_layers: int) -> ModelConfig:
        return ModelConfig(
            family="qwen3_moe",
            num_layers=num_layers,
            hidden_size=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            ffn_hidden_size=6144,
            vocab_size=151936,
            moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768),
        )

    def elements(num_layers: int) -> int:
        return sum(torch.Size(shape).numel() for shape in weight_map(of(num_layers)).hf_shapes.values())

    fixed, layer = 2 * elements(1) - elements(2), elements(2) - elements(1)
    layers = max(1, round((size / 2 - fixed) / layer))
    return of(layers)


def make(folder: Path, size: int) -> int:
    """Write the checkpoint; its bytes. Random bits, so that nothing can be compressed away."""
    folder.mkdir(parents=True)
    model = model_of(size)
    (folder / "config.json").write_text(json.dumps(hf_config(model) | {"torch_dtype": "bfloat16"}))
    shapes = weight_map(model).hf_shapes
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2**15 - 2**9, (64 << 20,), dtype=torch.int16, generator=generator)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        count = 2 * torch.Size(shape).numel()
        if filled + count > SHARD_BYTES and groups[-1]:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += count
    index: dict[str, str] = {}
    position = 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for name, shape in group.items():
            count = torch.Size(shape).numel()
            position = (position + 7919) % (1 << 20)
            bits = (
                noise
                if position + count <= len(noise)
                else noise.repeat(-(-(position + count) // len(noise)))
            )
            tensors[name] = bits[position : position + count].clone().view(torch.bfloat16).view(shape)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    os.sync()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def copy_file(pair: tuple[Path, Path]) -> None:
    """Copy as `cp` does, until the bytes are on the disk."""
    subprocess.run(["cp", "--reflink=never", *map(str, pair)], check=True)
    descriptor = os.open(pair[1], os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache, so that every measurement begins with the disk."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copied(source: Path, target: Path, workers: int) -> float:
    """Seconds to copy a folder with as many processes."""
    forget(source)
    target.mkdir()
    start = time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(copy_file, [(file, target / file.name) for file in sorted(source.iterdir())]))
    return time.monotonic() - start


def measured(name: str, plan, source: Path, settings: CopySettings, folder: Path) -> dict[str, float]:
    """Seconds of a conversion, planning included, and the peak memory of its workers."""
    forget(source)
    log = folder / f"{name}.jsonl"
    start = time.monotonic()
    with ByteProgress(Console(), log) as progress:
        convert(plan(), settings, progress)
    seconds = time.monotonic() - start
    events = [json.loads(line) for line in log.read_text().splitlines()]
    peaks = {event["worker"]: event["peak_rss_bytes"] for event in events if event["event"] == "task"}
    return {
        "seconds": round(seconds, 1),
        "peak_rss_gib": [round(peaks[worker] / GIB, 3) for worker in sorted(peaks)],
    }


def run(folder: Path, size: int, workers: int) -> dict[str, object]:
    """All measurements, with the load of the machine, which both sides of a ratio may not have had alike."""
    settings = CopySettings(workers=workers)
    source, checkpoint, back = folder / "hf", folder / "ckpt", folder / "back"
    # In a process of its own: workers are forked, and the memory of this one would count as theirs.
    with ProcessPoolExecutor(1) as pool:
        count = pool.submit(make, source, size).result()
    copy_s = copied(source, folder / "copy", workers)
    shutil.rmtree(folder / "copy")
    to_megatron = measured(
        "import", lambda: plan_import(source, checkpoint, ImportOptions(), settings), source, settings, folder
    )
    imported = checkpoint / "iter_0000000"
    shutil.rmtree(source)
    again_s = copied(imported, folder / "copy", workers)
    shutil.rmtree(folder / "copy")
    to_hf = measured(
        "export", lambda: plan_export(imported, back, ExportOptions(), settings), imported, settings, folder
    )
    first = json.loads((imported / MANIFEST).read_text())["sources"]["tensors"]
    last = {
        name: entry["crc32"] for name, entry in json.loads((back / MANIFEST).read_text())["tensors"].items()
    }
    return {
        "load_average": os.getloadavg(),
        "gib": round(count / GIB, 2),
        "workers": workers,
        "copy_s": round(copy_s, 1),
        "import": to_megatron | {"times_copy": round(to_megatron["seconds"] / copy_s, 2)},
        "copy_of_checkpoint_s": round(again_s, 1),
        "export": to_hf | {"times_copy": round(to_hf["seconds"] / again_s, 2)},
        "every_tensor_came_back": first == last,
    }


def main() -> int:
    """Measure, print a line of JSON, clean up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=num_bytes, default="1G", help="bytes of the checkpoint")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder; takes twice the size")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    try:
        print(json.dumps(run(args.folder, args.size, args.workers)))
    finally:
        shutil.rmtree(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
