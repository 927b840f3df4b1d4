"""Rollouts on an emulated GPU, step by step and by CUDA graphs (tests/emulated_gpu.py emulates those)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.model.build import build_model
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.sampling import Cut, running_sums
from mcore_rl.rl.types import Completion, Problem, Prompt
from tests.emulated_gpu import GPU, HOST, active, counted_syncs
from tests.sections import engine_config
from tests.tiny_models import TINY

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9], [3, 2, 3, 8]]
SAMPLING = Sampling(max_new_tokens=12, cut=Cut(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01), with_routes=True)


def rollouts() -> dict[str, Any]:
    """For two kinds of attention, how a rollout by graphs compares with one by the same steps as they are written.

    In bf16, for which a GPU has a kernel of all experts; deterministic, for which it has no running sums.
    """
    settings = PlatformConfig(precision="bf16", deterministic=True)
    started, mesh = platform.start(settings), build_mesh(MeshConfig())
    seed_ranks(1)
    found: dict[str, Any] = {"running_sum_difference": running_sum_difference()}
    for family in ("qwen3_moe", "deepseek_v3"):
        chunks = build_model(TINY[family], mesh, started, settings)
        found[family] = compared(chunks, TINY[family], mesh)
    platform.stop()
    return found


def running_sum_difference() -> float:
    """How far sums that do not depend on timing are from torch's on the host."""
    weights_BN = torch.rand(3, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sums_BN = running_sums(weights_BN.to(GPU))
    assert bool((sums_BN.diff(dim=1) >= 0).all())
    return float((sums_BN.to(HOST) - weights_BN.cumsum(1)).abs().max())


def compared(chunks: Sequence[nn.Module], model: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    gpu = active()
    assert gpu is not None
    plain, plain_waits = generated(chunks, model, mesh, cuda_graphs=False)
    gpu.graphs.clear()
    graphed, waits = generated(chunks, model, mesh, cuda_graphs=True)
    weights = {
        tensor.untyped_storage()._cdata for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())
    }
    return {
        "tokens_are_equal": [one.tokens_T for one in plain] == [one.tokens_T for one in graphed],
        "routes_are_equal": all(
            a.experts_TLK is not None and b.experts_TLK is not None and a.experts_TLK.equal(b.experts_TLK)
            for a, b in zip(plain, graphed, strict=True)
        ),
        "logprobs_are_equal": [one.logprobs_T for one in plain] == [one.logprobs_T for one in graphed],
        "completions": len(plain),
        "waits": waits,
        "plain_waits": plain_waits,
        "replays": [graph.replays for graph in gpu.graphs],
        # Beside the weights: the tokens, the caches, the routes and the rotary table, the same for every graph.
        "other_memory_is_the_same": len({frozenset(graph.read - weights) for graph in gpu.graphs}) == 1,
    }


def generated(
    chunks: Sequence[nn.Module], model: ModelConfig, mesh: Mesh, *, cuda_graphs: bool
) -> tuple[list[Completion], dict[str, int]]:
    """The completions, and where the host waited."""
    prompts = [
        Prompt(problem=Problem(problem_id=str(index), prompt="", answer=""), tokens_T=tuple(tokens))
        for index, tokens in enumerate(PROMPTS)
    ]
    config = engine_config(slots=6, step_tokens=16, cuda_graphs=cuda_graphs)
    engine = MegatronEngine(chunks, mesh, model, lambda _: "", config, has_fixed_shapes=True)
    with counted_syncs() as syncs:
        groups = engine.generate(prompts, SAMPLING, [[1, 2]] * len(prompts))
        waits = dict(syncs)
    return [one for group in groups for one in group.completions], waits
