"""Routes and batches on their way to an emulated GPU (tests/emulated_gpu.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.platform import Ahead, to_device
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.metrics.metrics import reduced
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.replay import from_rollouts
from mcore_rl.replay.cache import MicrobatchLayout, RouteStorage, RoutingCache, SampleSpan
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead
from tests.emulated_gpu import GPU, active, counted_syncs
from tests.parallel import parity
from tests.parallel.replaying import tiny

LENGTHS = (13, 8, 11)
ROWS = 4


def replayed() -> dict[str, Any]:
    """Record the routes of four microbatches, impose them in an update, and say what was read when."""
    gpu = active()
    model = tiny("qwen3_moe", num_layers=2)
    config = parity.config_of(model, MeshConfig(), PlatformConfig(precision="bf16"))
    state = set_up(config, platform.start(config.platform))
    if gpu:
        gpu.pageable.clear()
    layouts = [
        MicrobatchLayout(
            (tuple(SampleSpan(3 * row + index, length, length) for index, length in enumerate(LENGTHS)),),
            row_length=sum(LENGTHS),
            packed=True,
        )
        for row in range(ROWS)
    ]
    microbatches = [packed_row(row, state) for row in range(ROWS)]
    cache = RoutingCache(state.chunks, model, ReplayConfig(kind="r2", store="pinned"))
    with RoutingTape(state.chunks, state.mesh, layouts, cache, 1) as tape, torch.no_grad():
        run_pass(state.chunks, microbatches, NextTokenHead(), backward=False, routing=tape.record())
        tape.finish()
    events: list[str] = []
    read = cache.read

    def noted(*args: Any) -> Tensor:
        events.append("read")
        return read(*args)

    cache.read = noted  # type: ignore[method-assign]
    state.chunks[0].register_forward_pre_hook(lambda *_: events.append("forward"))
    with RoutingTape(state.chunks, state.mesh, layouts, cache, 1) as tape:
        routing = tape.impose()
        with counted_syncs() as syncs:
            run_pass(state.chunks, microbatches, NextTokenHead(), backward=True, routing=routing)
            waits = dict(syncs)
        metrics = reduced(tape.finish())
    destroy_mesh()
    platform.stop()
    return {
        "events": events,
        "waits": waits,
        "pageable": dict(gpu.pageable) if gpu else {},
        "changed_fraction": metrics["routes/changed_fraction"],
        "races": races() if gpu else [],
    }


def rollout_routes() -> dict[str, Any]:
    """Fill a cache with an engine's routes of eight samples; return the waits while they are checked in one batch and
    in eight, and what the emulation says of the checksums' device.
    """
    model = tiny("qwen3_moe", num_layers=2)
    config = parity.config_of(model, MeshConfig(), PlatformConfig(precision="bf16"))
    state = set_up(config, platform.start(config.platform))
    cache = RoutingCache(state.chunks, model, ReplayConfig(kind="r3"))
    shape = (9, model.num_layers, model.moe.num_experts)
    routes = [torch.rand(shape).topk(model.moe.top_k).indices.to(torch.uint8) for _ in range(8)]
    generated = {n: from_rollouts.RolloutRoutes(torch.arange(9), experts) for n, experts in enumerate(routes)}
    waits = []
    for batch_bytes in (2**20, 1):
        from_rollouts.BATCH_BYTES = batch_bytes
        with counted_syncs() as syncs:
            checked = from_rollouts._checked(cache, generated)
            waits.append(sum(syncs.values()))
    devices = [str(tensor.device) for tensor in (checked.is_repeated_n, checked.checksums_Nl)]
    destroy_mesh()
    platform.stop()
    return {"waits": waits, "devices": devices, "problems": checked.problems}


def packed_row(row: int, state: TrainState) -> LocalMicrobatch:
    """A row of three sequences."""
    generator = torch.Generator().manual_seed(row)
    tokens = torch.randint(0, 100, (1, sum(LENGTHS) + 1), generator=generator)
    return localize(
        Microbatch(
            tokens_BS=tokens[:, :-1],
            labels_BS=tokens[:, 1:],
            loss_mask_BS=torch.ones(1, sum(LENGTHS)),
            position_ids_BS=torch.cat([torch.arange(length) for length in LENGTHS])[None],
            packed=PackedSpans(cu_seqlens=torch.tensor((0, *LENGTHS)).cumsum(0).int(), max_length=max(LENGTHS)),
        ),
        state.mesh.cp,
        state.platform.device,
    )


def races() -> list[str]:
    """What the emulation says of a use before the wait, and of memory that is overwritten under a copy."""
    ahead, found = Ahead(GPU), []
    made: list[Tensor] = []

    def make() -> Tensor:
        made.append(to_device(torch.ones(4), GPU))
        return made[0]

    use = ahead.begin(make)
    found.append(error_of(lambda: made[0] + 1))
    found.append(error_of(lambda: use() + 1))
    staging = torch.zeros(4, pin_memory=True)
    ahead.begin(lambda: staging.to(GPU, non_blocking=True))
    found.append(error_of(lambda: staging.fill_(1.0)))
    return found


def kept_routes() -> tuple[list[list[int]], str, int]:
    """Rows that a storage in page-locked memory reads at once, what the emulation says of a read of its block without
    a wait, and the waits of a second read.
    """
    storage = RouteStorage("pinned", GPU)
    bytes_nw = to_device(torch.arange(12, dtype=torch.uint8).view(4, 3), GPU)
    first, second = storage.add(bytes_nw), storage.add(bytes_nw)
    too_early = error_of(lambda: storage._blocks[second][0] + 1)
    rows = storage.read(first, torch.tensor([2, 0]), GPU)
    with counted_syncs() as syncs:
        storage.read(second, torch.tensor([1]), GPU)
        num_waits = sum(syncs.values())
    return rows.tolist(), too_early, num_waits


def error_of(call: Callable[[], Any]) -> str:
    """The message of the error that a call raises; "" without one."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
