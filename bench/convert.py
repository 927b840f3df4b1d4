"""Time and memory of converting a synthetic MoE checkpoint, against copying the same bytes on the same disk.

    python bench/convert.py --size 20G --folder /tmp/convert_bench --workers 2
    python bench/convert.py --size 1G --folder /tmp/convert_bench --workers 1 --rounds 3 --checksums zlib

In one run: make the checkpoint, and in every round copy it, import it, copy the import, export it, compare both ends;
then delete all. The page cache is written back before each measurement; where the checkpoint is larger than memory,
every step reads from the disk. Each step's CPU seconds, of the program and of the kernel for it, are those of its
processes: they stay comparable on a busy machine, where seconds do not.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from mcore_rl import checksums
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


def cpu_seconds() -> float:
    """CPU seconds of this process and of those of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds and CPU seconds of a call whose processes end with it."""
    start, start_cpu = time.monotonic(), cpu_seconds()
    work()
    return {"seconds": round(time.monotonic() - start, 1), "cpu_s": round(cpu_seconds() - start_cpu, 2)}


def copied(source: Path, target: Path, workers: int) -> dict[str, float]:
    """Seconds to copy a folder with as many processes."""
    forget(source)
    target.mkdir()

    def copy() -> None:
        with ProcessPoolExecutor(workers) as pool:
            list(pool.map(copy_file, [(file, target / file.name) for file in sorted(source.iterdir())]))

    return timed(copy)


def measured(name: str, plan, source: Path, settings: CopySettings, folder: Path) -> dict[str, float]:
    """Seconds of a conversion, planning included, and the peak memory of its workers."""
    forget(source)
    log = folder / f"{name}.jsonl"

    def work() -> None:
        with ByteProgress(Console(), log) as progress:
            convert(plan(), settings, progress)

    times = timed(work)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    peaks = {event["worker"]: event["peak_rss_bytes"] for event in events if event["event"] == "task"}
    return times | {"peak_rss_gib": [round(peaks[worker] / GIB, 3) for worker in sorted(peaks)]}


def one_round(source: Path, folder: Path, settings: CopySettings) -> dict[str, dict[str, float] | bool]:
    """Both conversions, each after a copy of what it reads."""
    checkpoint, back, copy = folder / "ckpt", folder / "back", folder / "copy"
    imported = checkpoint / "iter_0000000"
    found: dict[str, dict[str, float] | bool] = {"copy": copied(source, copy, settings.workers)}
    shutil.rmtree(copy)
    found["import"] = measured(
        "import", lambda: plan_import(source, checkpoint, ImportOptions(), settings), source, settings, folder
    )
    found["copy_of_checkpoint"] = copied(imported, copy, settings.workers)
    shutil.rmtree(copy)
    found["export"] = measured(
        "export", lambda: plan_export(imported, back, ExportOptions(), settings), imported, settings, folder
    )
    first = json.loads((imported / MANIFEST).read_text())["sources"]["tensors"]
    last = {
        name: entry["crc32"] for name, entry in json.loads((back / MANIFEST).read_text())["tensors"].items()
    }
    found["every_tensor_came_back"] = first == last
    shutil.rmtree(checkpoint)
    shutil.rmtree(back)
    return found


def run(folder: Path, size: int, workers: int, rounds: int) -> dict[str, object]:
    """All measurements, with the load of the machine, which both sides of a ratio may not have had alike."""
    source = folder / "hf"
    # In a process of its own: workers are forked, and the memory of this one would count as theirs.
    with ProcessPoolExecutor(1) as pool:
        count = pool.submit(make, source, size).result()
    found = [one_round(source, folder, CopySettings(workers=workers)) for _ in range(rounds)]
    ratios = {
        f"{name}_times_copy_{unit}": [round(one[name][unit] / max(one[copy][unit], 0.01), 2) for one in found]
        for name, copy in (("import", "copy"), ("export", "copy_of_checkpoint"))
        for unit in ("seconds", "cpu_s")
    }
    return {
        "load_average": os.getloadavg(),
        "gib": round(count / GIB, 2),
        "workers": workers,
        "checksums": checksums.crc32.__module__,
        "rounds": found,
        **{name: {"median": statistics.median(values), "all": values} for name, values in ratios.items()},
    }


def without_isal() -> None:
    """Take zlib's CRC-32 everywhere, as where isal is not installed."""
    fast = checksums.crc32
    for name, module in list(sys.modules.items()):
        if name.startswith("mcore_rl") and getattr(module, "crc32", None) is fast:
            module.crc32 = zlib.crc32


def main() -> int:
    """Measure, print a line of JSON, clean up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=num_bytes, default="1G", help="bytes of the checkpoint")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder; takes twice the size")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--checksums", choices=("auto", "zlib"), default="auto", help="auto: isal where it is"
    )
    args = parser.parse_args()
    if args.checksums == "zlib":
        without_isal()
    args.folder.mkdir(parents=True)
    try:
        print(json.dumps(run(args.folder, args.size, args.workers, args.rounds)))
    finally:
        shutil.rmtree(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
