"""Measure a push of weights by files on this machine: one rank writes all, and every rank writes its part.

    python -m bench.push --mib 256

Four gloo ranks (tp 2, ep 2, pp 2) send a Qwen3-MoE in bf16 to servers in threads of this process, which read each file
with its checksum and copy the tensors, as vLLM's worker does. Printed are seconds: of the slowest rank that gathers and
that writes, of loading, and of all three together, during which servers are paused.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model
from mcore_rl.model.hf_stream import WeightStream
from mcore_rl.rl.engines.weight_push import FileTransport, Sender, Stopwatch, new_folder
from mcore_rl.storage.checksums import crc32_of
from tests.ranks import run_ranks
from tests.tiny_models import TINY

MESH, RANKS, PASSES = MeshConfig(tp=2, ep=2, pp=2), 4, 3


class Reader:
    """A server that reads what it is sent."""

    url = "http://reader:1"

    def load(self, update: Mapping[str, Any]) -> None:
        """Read all files, with their checksums, and copy their tensors."""
        for file in update["files"]:
            assert crc32_of(Path(file["path"])) == file["crc32"]
            for tensor in load_file(file["path"]).values():
                tensor.clone()


def model_of(mib: int) -> ModelConfig:
    """Return a model of 8 layers of 32 experts with about this size in bf16."""
    tiny = TINY["qwen3_moe"]
    moe = tiny.moe.model_copy(update={"num_experts": 32, "ffn_hidden_size": 256})
    hidden = max(64, mib * 2**20 // (8 * 32 * 3 * 256 * 2) // 64 * 64)
    return tiny.model_copy(update={"num_layers": 8, "hidden_size": hidden, "moe": moe})


def pushed(model: ModelConfig) -> list[tuple[str, int, dict[str, float]]]:
    """On a rank: return, for either way, the bytes and the least seconds of each part."""
    settings = PlatformConfig(layers="torch", precision="bf16")
    platform = start(settings)
    mesh = build_mesh(MESH)
    seed_ranks(1)
    chunks = build_model(model, mesh, platform, settings)
    found = []
    for name, to_rank in (("one rank", 0), ("every rank", None)):
        stream, rows = WeightStream(chunks, mesh, model, to_rank=to_rank), []
        for _ in range(PASSES):
            folder = on_rank_zero(lambda: str(new_folder(Path("/dev/shm"))))
            watch = Stopwatch()
            sender = Sender([Reader()]) if mesh.world.rank == 0 else None  # type: ignore[list-item]
            sizes = FileTransport(folder, stream).send(sender, watch)
            rows.append({part: float(seconds) for part, seconds in watch.seconds.items()})
        found.append((name, sizes.num_bytes, min(rows, key=lambda row: row["transfer"])))
    return found


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    cores, model = len(os.sched_getaffinity(0)), model_of(parser.parse_args().mib)
    sys.stdout.write(f"{cores} cores, load {os.getloadavg()[0]:.1f}\n")
    sys.stdout.write("| written by | MiB | gather | write | load | all together |\n|---|--:|--:|--:|--:|--:|\n")
    for name, num_bytes, seconds in run_ranks(pushed, RANKS, model)[0]:
        parts = " | ".join(f"{seconds[part]:.2f}" for part in ("gather", "write", "load", "transfer"))
        sys.stdout.write(f"| {name} | {num_bytes / 2**20:,.0f} | {parts} |\n")


if __name__ == "__main__":
    main()
