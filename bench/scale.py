"""Measure the cost of plans on one rank of a large world, without the rest of it: 64 layers of 256 experts.

    python -m bench.scale --worlds 64 1024 4096
    python -m bench.scale --worlds 4096 --only "push: by one rank"

Each world is a process of its own, in which one rank's groups are made by tests/fake_world.py and weights have no
memory. Printed are CPU seconds, the bytes that the rank would send to others, and the peak memory of the process.
`--only` measures the plans whose names have this text, and what they need before them.
"""

import argparse
import pickle
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import mcore_rl
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import AxisRange, whole
from mcore_rl.model import hf_stream
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import LocalShard, build_model, local_shards
from mcore_rl.model.hf_stream import WeightStream, _Held, _held, bucket_of
from mcore_rl.planning.estimate import estimate, place_of
from mcore_rl.planning.search import search
from mcore_rl.planning.training import training_of
from mcore_rl.replay.exchange import NeededPositions, RouteOffer, plan_requests
from mcore_rl.storage.checkpoints.write import weights_state
from tests.fake_world import buildable, fake_platform, fake_rank, on_meta

LAYERS, EXPERTS = 64, 256
MESH = MeshConfig(ep=32, pp=2)
SAMPLES_OF_A_REPLICA, TOKENS = 32, 8192
CHECKPOINTS = (
    "checkpoint: which rank writes or reads a shard",
    "checkpoint: whether the ranks have all shards (once a run)",
    "checkpoint: what the rank writes in a save",
    "checkpoint: all files of a save, on rank 0",
    "checkpoint: what the rank reads in a load",
)
LAUNCH = Path(mcore_rl.__file__).parents[1] / "launch"
RECIPE, CLUSTER = LAUNCH / "recipes/qwen3_30b_a3b/gspo.toml", LAUNCH / "clusters/example_h100.toml"


def measured(world: int, only: str) -> None:
    """Print a row for each plan whose name has the text `only`, as rank 0 of a world with ep 32 and pp 2 makes it."""
    config = load_config(RlRunConfig, RECIPE, [])
    experts = config.model.moe.model_copy(update={"num_experts": EXPERTS})
    model = config.model.model_copy(update={"num_layers": LAYERS, "moe": experts})
    clock = SimpleNamespace(before=time.process_time())

    def row(name: str, sent: object = None) -> None:
        cpu_s, sent_bytes = time.process_time() - clock.before, 0 if sent is None else len(pickle.dumps(sent))
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if name:  # else what came before is of the fake
            sys.stdout.write(f"| {world:,} | {name} | {cpu_s:.1f} | {sent_bytes:,} | {peak_mib:,.0f} |\n")
            sys.stdout.flush()
        clock.before = time.process_time()

    def wants(*names: str) -> bool:
        clock.before = time.process_time()
        return any(only in name for name in names)

    with fake_rank(MESH, 0, world) as mesh, on_meta():
        row("groups of the mesh")
        chunks = build_model(buildable(model), mesh, fake_platform(config.platform, mesh), config.platform)
        row("model")
        shards = list(local_shards(chunks))
        row("shards for checkpoints and pushes")
        weights = weight_map(model)
        row("conversion: pairs of tensors")
        for to_rank, name in ((0, "push: by one rank"), (None, "push: by every rank")):
            if not wants(name):
                continue
            lists = [taken(shards, rank, world, to_rank) for rank in range(world)]
            last = weights.mcore_shapes.keys() - {shard.key for shard in shards}
            lists[world // 2] += [
                _Held(key=key, where=whole(weights.mcore_shapes[key]), dtype=torch.bfloat16) for key in last
            ]
            parts = Counter(bucket_of(name) for name in (*weights.hf_shapes, *(copy.name for copy in weights.copies)))
            answers = iter([lists, [parts]])
            stream: Any = hf_stream
            stream.gathered_on = lambda *_, answers=answers: next(answers)
            row("")
            WeightStream(chunks, mesh, model, to_rank=to_rank)
            row(name, lists[0] if to_rank == 0 else lists)
        replicas = mesh.dp_cp.size
        if wants(name := "adapters: what the rank that gathers is told"):
            add_adapters(chunks, LoraConfig(rank=8, targets=("attention", "experts")), model, seed=0)
            clock.before = time.process_time()
            adapters = [shard for shard in local_shards(chunks) if shard.is_main and ".adapter." in shard.key]
            row(name, adapters)
    layers = tuple(range(LAYERS // 2))
    if wants(name := "replay (R3): requests for routes"):
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
        row(name, offers[0])
    cluster = place_of(load_config(ClusterConfig, CLUSTER))
    planned = config.model_copy(update={"model": model, "mesh": config.mesh.model_copy(update={"ep": 32, "pp": 2})})
    planned = planned.decided(is_cuda=True)
    if wants(name := "`mcore-rl plan` of this mesh"):
        estimate(training_of(planned, world), cluster)
        row(name)
    if wants(name := "`mcore-rl plan --search`"):
        search(planned, world, cluster)
        row(name)
    if wants(*CHECKPOINTS):
        checkpoint_plans(config, model, world, row, wants, clock)


def taken(shards: Sequence[LocalShard], rank: int, world: int, to_rank: int | None) -> list[_Held]:
    """Return the shards of a push that are taken from a rank, where one rank or (None) every rank gathers, as rank 0's
    shards at other places.
    """
    stage, rank = divmod(rank, world // MESH.pp)
    replica, share = divmod(rank, MESH.ep)
    found: list[_Held] = []
    if replica >= (LAYERS // MESH.pp if to_rank is None else 1):
        return found  # nothing is taken from later copies
    for shard in shards:
        of_experts, has_layer = ".experts." in shard.key, shard.global_shape[0] == LAYERS
        copies, copy = (world // MESH.pp // MESH.ep, replica) if of_experts else (world // MESH.pp, rank)
        held = _held(shard)
        first, *rest = held.where
        if has_layer:
            first = shifted(first, stage * LAYERS // MESH.pp)
        if copy == (first.start % copies if has_layer and to_rank is None else 0) and (has_layer or stage == 0):
            if of_experts:
                rest[0] = shifted(rest[0], share * EXPERTS // MESH.ep)
            found.append(replace(held, where=(first, *rest)))
    return found


def shifted(axis: AxisRange, by: int) -> AxisRange:
    """Return a range of indices that begins later."""
    return AxisRange(axis.start + by, axis.stop + by)


def checkpoint_plans(
    config: RlRunConfig,
    model: ModelConfig,
    world: int,
    row: Callable[..., None],
    wants: Callable[..., bool],
    clock: Any,
) -> None:
    """Print what a save and a load of the weights cost rank 0, which is given all ranks' lists of shards: its own at
    other places of the tensors. With the optimizer's states there are four times as many shards.
    """
    with fake_rank(MESH, 0, world) as mesh:
        with on_meta():
            chunks = build_model(buildable(model), mesh, fake_platform(config.platform, mesh), config.platform)
            state = load_preprocess(weights_state(chunks, mesh))[0]
        own = [leaf for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)]
        data = pickle.dumps([shard.without_data() for shard in own])

        def gather(values: list[Any], value: Any, group: Any = None) -> None:
            del value, group
            for rank in range(len(values)):
                shards, began_s = pickle.loads(data), time.process_time()
                values[rank] = moved(shards, rank, world)
                clock.before += time.process_time() - began_s  # of the fake

        functions: Any = dist
        functions.all_gather_object = gather
        who, whole_model, saved, files, loaded = CHECKPOINTS
        if wants(who):
            determine_main_replica_uniform_distribution({"own": own}, mesh.dp_cp.group)
            row(who, data)
        if wants(whole_model):
            validate_sharding_integrity(determine_global_metadata({"own": own})[1])
            row(whole_model, data)
        if not wants(saved, files, loaded):
            return
        saver = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        plan = local_plan(own, saver)
        row(saved, plan)
        # A shard is written once: the first copy of the model has all of them, and dense ones on its first rank.
        plans = [elsewhere(plan, stage, share) for stage in range(MESH.pp) for share in range(MESH.ep)]
        row("")
        _, metadata = saver.create_global_plan(plans)
        row(files)
        local_plan(own, MCoreLoadPlanner(shapes_validation_sharded_tensors=own), metadata)
        row(loaded)


def local_plan(shards: list[ShardedTensor], planner: Any, metadata: Metadata | None = None) -> Any:
    """Return the rank's plan to save shards, or to load them from a checkpoint with this metadata."""
    by_key = _replace_state_dict_keys_with_sharded_keys({"own": shards}, False)[0]
    planner.state_dict = planner.original_state_dict = mcore_to_pyt_state_dict(by_key, False)
    planner.is_coordinator, planner.metadata = True, metadata
    return planner.create_local_plan()


def elsewhere(plan: SavePlan, stage: int, share: int) -> SavePlan:
    """Return rank 0's plan of a save as another rank has it, whose stage and experts are others."""
    items = []
    for item in plan.items:
        assert item.tensor_data is not None
        (at, *rest), of_experts = item.tensor_data.chunk.offsets, ".experts." in item.index.fqn
        if item.tensor_data.size[0] == LAYERS:
            at += stage * LAYERS // MESH.pp
        if of_experts:
            rest[0] += share * EXPERTS // MESH.ep
        offsets = torch.Size((at, *rest))
        chunk = replace(item.tensor_data.chunk, offsets=offsets)
        if of_experts or share == 0:
            tensor = replace(item.tensor_data, chunk=chunk)
            items.append(replace(item, index=replace(item.index, offset=offsets), tensor_data=tensor))
    return replace(plan, items=items)


def moved(shards: list[ShardedTensor], rank: int, world: int) -> list[ShardedTensor]:
    """Return copies of rank 0's shards at the places in their tensors at which `rank` has its own."""
    stage, rank = divmod(rank, world // MESH.pp)
    replica, share = divmod(rank, MESH.ep)
    found = [copy(shard) for shard in shards]
    for shard in found:
        of_experts = ".experts." in shard.key
        at = list(shard.global_offset)
        if shard.global_shape[0] == LAYERS:
            at[0] = shard.global_offset[0] % (LAYERS // MESH.pp) + stage * LAYERS // MESH.pp
        if of_experts:
            at[1] = shard.global_offset[1] % (EXPERTS // MESH.ep) + share * EXPERTS // MESH.ep
        shard.global_offset = tuple(at)
        shard.replica_id = (*shard.replica_id[:-1], replica if of_experts else rank)
        if shard.global_shape[0] != LAYERS:
            shard.replica_id = (stage, *shard.replica_id[1:])
    return found


def main() -> None:
    """Measure each world in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--only", default="", help="text that the names of plans have")
    worlds, only = (args := parser.parse_args()).worlds, args.only
    if len(worlds) == 1:
        measured(worlds[0], only)
        return
    sys.stdout.write("| ranks | plan | CPU s | bytes sent | peak MiB |\n|--:|---|--:|--:|--:|\n")
    sys.stdout.flush()
    for world in worlds:
        subprocess.run([sys.executable, "-m", "bench.scale", "--worlds", str(world), "--only", only], check=True)


if __name__ == "__main__":
    main()
