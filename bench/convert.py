"""Time and memory of converting a synthetic MoE checkpoint, against copying the same bytes on the same disk.

    python -m bench.convert                                    the least, 2.3 GiB; 4 rounds; results/convert.json
    python -m bench.convert --size 20G --folder /scratch/convert --workers 2
    python -m bench.convert --workers 1 --checksums zlib

In one run: make the checkpoint, and in every round copy it, import it, copy the import, export it, compare both ends;
then delete all. Every other round converts first and copies then, so that a disk that grows slower or faster favours
neither. The page cache is written back before each measurement; where the checkpoint is larger than memory, every step
reads from the disk. Each step's CPU seconds, of the program and of the kernel for it, are those of its processes: they
stay comparable on a busy machine, where seconds do not. Contention is the share of the machine that other programs
took; a row above 1.3 is marked, and never quoted.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; a thread each on a shared machine

import torch
from rich.console import Console
from safetensors.torch import save_file

from bench.clock import (
    Others,
    Peaks,
    circumstances,
    circumstances_line,
    machine_cpu_s,
    ratio_over_rounds,
    write_results,
)
from mcore_rl.cli.commands import num_bytes
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.convert.copying.conversion import Conversion, CopySettings
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.convert.importing import ImportOptions, plan_import
from mcore_rl.families import hf_config, weight_map
from mcore_rl.metrics.progress import ByteProgress
from mcore_rl.storage import checksums
from mcore_rl.storage.checkpoint import MANIFEST

GIB = 2**30
SHARD_BYTES = 2 * GIB
RESULTS = Path(__file__).parent / "results" / "convert.json"


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
            bits = noise if position + count <= len(noise) else noise.repeat(-(-(position + count) // len(noise)))
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


def timed(work: Callable[[], object], others: Others) -> dict[str, float]:
    """Seconds and CPU seconds of a call whose processes end with it; `others` counts what other programs took."""
    start, start_cpu, start_machine = time.monotonic(), cpu_seconds(), machine_cpu_s()
    work()
    seconds, cpu_s = time.monotonic() - start, cpu_seconds() - start_cpu
    others.add(cpu_s, machine_cpu_s() - start_machine, seconds)
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2)}


def copied(source: Path, target: Path, workers: int, others: Others) -> dict[str, float]:
    """Seconds to copy a folder with as many processes; the copy is deleted."""
    forget(source)
    target.mkdir()

    def copy() -> None:
        with ProcessPoolExecutor(workers) as pool:
            list(pool.map(copy_file, [(file, target / file.name) for file in sorted(source.iterdir())]))

    times = timed(copy, others)
    shutil.rmtree(target)
    return times


def measured(
    name: str, plan: Callable[[], Conversion], source: Path, settings: CopySettings, folder: Path, others: Others
) -> dict[str, Any]:
    """Seconds of a conversion, planning included, and the peak memory of its workers."""
    forget(source)
    log = folder / f"{name}.jsonl"

    def work() -> None:
        with ByteProgress(Console(), log) as progress:
            convert(plan(), settings, progress)

    times = timed(work, others)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    peaks = {event["worker"]: event["peak_rss_bytes"] for event in events if event["event"] == "task"}
    return times | {"peak_rss_gib": [round(peaks[worker] / GIB, 3) for worker in sorted(peaks)]}


def one_round(
    source: Path, folder: Path, settings: CopySettings, others: dict[str, Others], *, copies_first: bool
) -> dict[str, Any]:
    """Both conversions, each beside a copy of what it reads."""
    checkpoint, back, copy = folder / "ckpt", folder / "back", folder / "copy"
    imported = checkpoint / "iter_0000000"

    def import_it() -> dict[str, Any]:
        def plan() -> Conversion:
            return plan_import(source, checkpoint, ImportOptions(), settings)

        return measured("import", plan, source, settings, folder, others["import"])

    def export_it() -> dict[str, Any]:
        def plan() -> Conversion:
            return plan_export(imported, back, ExportOptions(), settings)

        return measured("export", plan, imported, settings, folder, others["export"])

    found: dict[str, Any] = {}
    for name, read, convert_it in (("import", source, import_it), ("export", imported, export_it)):
        if not copies_first:
            found[name] = convert_it()
        found[f"copy_for_{name}"] = copied(read, copy, settings.workers, others[name])
        if copies_first:
            found[name] = convert_it()
    first = json.loads((imported / MANIFEST).read_text())["sources"]["tensors"]
    last = {name: entry["crc32"] for name, entry in json.loads((back / MANIFEST).read_text())["tensors"].items()}
    found["every_tensor_came_back"] = first == last
    shutil.rmtree(checkpoint)
    shutil.rmtree(back)
    return found


def run(folder: Path, size: int, workers: int, rounds: int) -> dict[str, Any]:
    """All measurements: a row for the import, and one for the export."""
    source = folder / "hf"
    # In a process of its own: workers are forked, and the memory of this one would count as theirs.
    with ProcessPoolExecutor(1) as pool:
        count = pool.submit(make, source, size).result()
    others, peaks = {"import": Others(), "export": Others()}, Peaks()
    found = []
    for index in range(rounds):
        peaks.measure()
        settings = CopySettings(workers=workers)
        found.append(one_round(source, folder, settings, others, copies_first=index % 2 == 0))
    rows = {}
    for name in others:
        conversions, copies = ([one[of] for one in found] for of in (name, f"copy_for_{name}"))
        rows[name] = {
            "times_copy": {
                unit: ratio_over_rounds([one[unit] for one in conversions], [one[unit] for one in copies])
                for unit in ("cpu_s", "seconds")
            },
            "cpu_s": median(one["cpu_s"] for one in conversions),
            "seconds": median(one["seconds"] for one in conversions),
            "copy_cpu_s": median(one["cpu_s"] for one in copies),
            "copy_seconds": median(one["seconds"] for one in copies),
            "peak_rss_gib": max(peak for one in conversions for peak in one["peak_rss_gib"]),
            **circumstances(others[name].contention, peaks),
        }
    return {
        "gib": round(count / GIB, 2),
        "workers": workers,
        "checksums": checksums.crc32.__module__,
        "rows": rows,
        "rounds": found,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as text."""
    lines = ["row     CPU seconds    of cp  times cp (quartiles)   seconds   of cp  times cp (quartiles)   peak GiB"]
    for name, row in rows.items():
        cells = []
        for unit, copy in (("cpu_s", "copy_cpu_s"), ("seconds", "copy_seconds")):
            ratio = row["times_copy"][unit]
            low, high = ratio["ratio_quartiles"]
            cells.append(f"{row[unit]:11.2f} {row[copy]:8.2f}  {ratio['ratio']:8.2f} ({low:.2f}-{high:.2f})")
        lines += [f"{name:6s} {'  '.join(cells)}  {row['peak_rss_gib']:8.3f}", circumstances_line(row)]
    return "\n".join(lines)


def without_isal() -> None:
    """Take zlib's CRC-32 everywhere, as where isal is not installed."""
    fast = checksums.crc32
    for name, module in list(sys.modules.items()):
        if name.startswith("mcore_rl") and getattr(module, "crc32", None) is fast:
            module.crc32 = zlib.crc32


def main() -> int:
    """Measure, print, write, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=num_bytes, default="1G", help="bytes of the checkpoint")
    parser.add_argument(
        "--folder", type=Path, help="a new folder, which takes thrice the size (default: a temporary one)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--checksums", choices=("auto", "zlib"), default="auto", help="auto: isal where it is")
    args = parser.parse_args()
    if args.checksums == "zlib":
        without_isal()
    torch.set_num_threads(1)
    if args.folder is None:
        folder = Path(tempfile.mkdtemp())
    else:
        folder = args.folder
        folder.mkdir(parents=True)
    try:
        figures = run(folder, args.size, args.workers, args.rounds)
    finally:
        shutil.rmtree(folder)
    print(table(figures["rows"]))
    words = ["--size", str(args.size), "--workers", str(args.workers), "--rounds", str(args.rounds)]
    write_results(RESULTS, figures, [*words, "--checksums", args.checksums])
    return 0


if __name__ == "__main__":
    sys.exit(main())
