"""The served engine on a rank of any mesh; apart from its test, so that ranks need not import it."""

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.routers import routed_layers
from mcore_rl.model import hf_stream
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import build_model
from mcore_rl.model.global_tensors import local_shards
from mcore_rl.model.hf_stream import Bucket, iter_hf_weights
from mcore_rl.rl.engines import weight_push
from mcore_rl.rl.engines.adapter_push import AdapterPush, ServedAdapters
from mcore_rl.rl.engines.base import Sampling, sampling_of
from mcore_rl.rl.engines.make import make_engine, server_apis
from mcore_rl.rl.engines.probe import Probe, ProbeReference
from mcore_rl.rl.engines.weight_push import PushReport, WeightPush
from mcore_rl.rl.types import Completion, Prompt
from tests.generating import Tensors, loaded, prompt_of, spelled
from tests.parallel.converted import LiveBytes


def served_completions(
    config: RlRunConfig, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[int, tuple[int, ...], list[Completion], str]:
    """This rank's replica, its layers, the completions of its share of the prompts, and the error of a bad prompt that
    the last replica alone has.
    """
    settings = PlatformConfig(layers="torch")
    platform = start(settings)
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = build_model(config.model, mesh, platform, settings)
    engine = make_engine(config, chunks, mesh, spelled)
    engine.update_weights(4)
    replicas = mesh.dp_cp
    own = prompts[replicas.rank :: replicas.size]
    groups = engine.generate(own, sampling, [[7, 8]] * len(own))
    error = ""
    bad = [prompt_of((1, 10_000))] if replicas.rank == replicas.size - 1 else []
    try:
        engine.generate(bad, sampling, [[1]] * len(bad))
    except EngineError as raised:
        error = str(raised)
    engine.close()
    return replicas.rank, routed_layers(chunks), [one for group in groups for one in group.completions], error


def pushed(
    config: RlRunConfig, tensors: Tensors, message_bytes: int
) -> tuple[PushReport, int, ProbeReference]:
    """The outcome of a push of these weights, the most bytes of tensors that this rank had for it at a time, and the
    trainer's side of the probe of servers in bf16.
    """
    hf_stream.MESSAGE_BYTES = message_bytes
    settings = PlatformConfig(layers="torch")
    start(settings)
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = loaded(config.model, tensors, mesh)
    engine = config.rl.engine
    apis = [server_apis(engine, config.model)(url) for url in engine.urls] if mesh.world.rank == 0 else []
    live = LiveBytes(shard.data for shard in local_shards(chunks))

    def watched(*args: Any) -> Iterator[Bucket]:
        """What the push gathers, and all that it does with it."""
        with live:
            for index, bucket in enumerate(iter_hf_weights(*args)):
                if index == 0:
                    live.most = 0  # before the first bucket ranks exchange their lists of tensors
                yield bucket

    weight_push.iter_hf_weights = watched
    report = WeightPush(apis, chunks, mesh, config.model, engine, sampling_in(config)).push(7)
    return report, live.most, Probe(chunks, mesh, config.model, "bf16").reference()


def sampling_in(config: RlRunConfig) -> Sampling:
    return sampling_of(config.rl.rollout, (), vocab_size=config.model.vocab_size, with_routes=False)


def adapters_on_a_full_disk(config: RlRunConfig, tensors: Tensors) -> PushReport:
    """On a rank: the outcome of a push of low-rank adapters that do not fit into the folder for them."""
    mesh, chunks = _with_adapters(config, tensors)
    engine = config.rl.engine
    api: Any = SimpleNamespace(url=engine.urls[0])
    served = ServedAdapters(Path(engine.transport_dir))
    push = AdapterPush(
        [api], chunks, mesh, config.model, engine, sampling_in(config), lora=config.lora, served=served
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    report = push.push(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return report


def adapters_pushed_twice(
    config: RlRunConfig, tensors: Tensors, sizes: Sequence[float]
) -> list[tuple[PushReport, list[str]]]:
    """On a rank: the outcomes of pushes of low-rank adapters alone, with these sizes of B, and the folders that are
    left after each.
    """
    mesh, chunks = _with_adapters(config, tensors)
    engine = config.rl.engine
    is_first = mesh.world.rank == 0
    apis = [server_apis(engine, config.model)(url) for url in engine.urls] if is_first else []
    served = ServedAdapters(Path(engine.transport_dir)) if is_first else None
    push = AdapterPush(
        apis, chunks, mesh, config.model, engine, sampling_in(config), lora=config.lora, served=served
    )
    found = []
    for version, size in enumerate(sizes):
        for shard in local_shards(chunks):
            if shard.key.endswith("adapter.B"):
                generator = torch.Generator().manual_seed(len(shard.key))
                whole = size * torch.randn(shard.global_shape, generator=generator)
                shard.data.detach().copy_(whole[shard.where])
        report = push.push(version)
        found.append((report, [path.name for path in served.path.iterdir()] if served else []))
    return found


def pushed_adapters(config: RlRunConfig, tensors: Tensors) -> PushReport:
    """On a rank: the outcome of a push of these weights with random low-rank adapters."""
    mesh, chunks = _with_adapters(config, tensors)
    for shard in local_shards(chunks):
        if shard.key.endswith("adapter.B"):
            whole = torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(len(shard.key)))
            shard.data.detach().copy_(0.1 * whole[shard.where])
    engine = config.rl.engine
    apis = [server_apis(engine, config.model)(url) for url in engine.urls] if mesh.world.rank == 0 else []
    return WeightPush(apis, chunks, mesh, config.model, engine, sampling_in(config)).push(7)


def _with_adapters(config: RlRunConfig, tensors: Tensors) -> tuple[Mesh, list[nn.Module]]:
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = loaded(config.model, tensors, mesh)
    add_adapters(chunks, config.lora, config.model, seed=1)
    return mesh, chunks
