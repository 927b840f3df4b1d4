"""Measure the cost of plans on one rank of a large world, without the rest of it: 64 layers of 256 experts.

    python -m bench.scale --worlds 64 1024 4096

Each world is a process of its own, in which one rank's groups are made by tests/fake_world.py and weights have no
memory. Printed are CPU seconds, the bytes that the rank would send to others, and the peak memory of the process.
"""

import argparse
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import mcore_rl
from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import copies_into_megatron
from mcore_rl.model.build import build_model, local_shards
from mcore_rl.model.hf_stream import _held, _pieces
from mcore_rl.replay.exchange import NeededPositions, RouteOffer, plan_requests
from tests.fake_world import buildable, fake_platform, fake_rank, on_meta

LAYERS, EXPERTS = 64, 256
SAMPLES_OF_A_REPLICA, TOKENS = 32, 8192
RECIPE = Path(mcore_rl.__file__).parents[1] / "launch/recipes/qwen3_30b_a3b/gspo.toml"


def measured(world: int) -> None:
    """Print a row for each plan, as rank 0 of a world with ep 32 and pp 2 makes it."""
    config = load_config(RlRunConfig, RECIPE, [])
    experts = config.model.moe.model_copy(update={"num_experts": EXPERTS})
    model = config.model.model_copy(update={"num_layers": LAYERS, "moe": experts})
    clock = SimpleNamespace(before=time.process_time())

    def row(name: str, sent: object = None) -> None:
        cpu_s, sent_bytes = time.process_time() - clock.before, 0 if sent is None else len(pickle.dumps(sent))
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        sys.stdout.write(f"| {world:,} | {name} | {cpu_s:.1f} | {sent_bytes:,} | {peak_mib:,.0f} |\n")
        sys.stdout.flush()
        clock.before = time.process_time()

    with fake_rank(MeshConfig(ep=32, pp=2), 0, world) as mesh, on_meta():
        row("groups of the mesh")
        chunks = build_model(buildable(model), mesh, fake_platform(config.platform, mesh), config.platform)
        row("model")
        shards = list(local_shards(chunks))
        row("shards for checkpoints and pushes")
        held = [_held(shard) for shard in shards if shard.is_main]
        row("push: what the rank that gathers is told", held)
        weights = weight_map(model)
        row("conversion: pairs of tensors")
        copies = copies_into_megatron(weights.blocks)
        _pieces(copies, held)
        row("push: what the rank sends")
        replicas = mesh.dp_cp.size
    layers = tuple(range(LAYERS // 2))
    offers = [
        {
            replica * SAMPLES_OF_A_REPLICA + n: RouteOffer(TOKENS, layers, ((0, TOKENS),), (), None)
            for n in range(SAMPLES_OF_A_REPLICA)
        }
        for replica in range(replicas)
    ]
    clock.before = time.process_time()
    needed = {n * replicas: NeededPositions(TOKENS, torch.arange(TOKENS)) for n in range(SAMPLES_OF_A_REPLICA)}
    plan_requests(needed, layers, offers, 0)
    row("replay (R3): requests for routes", offers[0])


def main() -> None:
    """Measure each world in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 4096])
    worlds = parser.parse_args().worlds
    if len(worlds) == 1:
        measured(worlds[0])
        return
    sys.stdout.write("| ranks | plan | CPU s | bytes sent | peak MiB |\n|--:|---|--:|--:|--:|\n")
    sys.stdout.flush()
    for world in worlds:
        subprocess.run([sys.executable, "-m", "bench.scale", "--worlds", str(world)], check=True)


if __name__ == "__main__":
    main()
