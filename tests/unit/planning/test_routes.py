"""A route takes a byte for each expert, or two, and goes to the memory that the config names."""

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.planning.memory import memory_by_stage
from mcore_rl.planning.routes import RouteBytes, layer_bytes, routes_of_rank
from mcore_rl.planning.training import training_of

WORDS = [
    "model.family=qwen3_moe",
    "model.num_layers=4",
    "model.moe.num_experts=128",
    "model.moe.top_k=8",
    "model.max_position=4096",
    "train.global_batch=64",
    "rl.rollout.prompts_per_step=16",
    "rl.rollout.group_size=8",
    "rl.rollout.max_new_tokens=1000",
    "rl.prompts.max_tokens=24",
]
TOKENS = 16 * 8 * 1024


def training(*overrides, world=1):
    return training_of(load_config(RlRunConfig, None, [*WORDS, *overrides]), world)


@pytest.mark.parametrize(
    ("experts", "layers", "top_k", "capacity", "expected"),
    [
        (128, 48, 8, None, 384),  # Qwen3-30B-A3B
        (128, 94, 8, None, 752),  # Qwen3-235B-A22B
        (256, 58, 8, None, 464),  # DeepSeek-V3
        (384, 60, 8, None, 960),  # Kimi K2
        (512, 48, 10, None, 960),  # Qwen3-Next
        (16, 1, 4, 1.0, 4),
        (129, 1, 4, 1.0, 8),  # 258 codes: a dropped choice has a code of its own
    ],
)
def test_bytes_per_token(experts, layers, top_k, capacity, expected):
    """An int64 for each of 48 layers and 8 experts takes 3072 bytes; tests/unit/replay/test_cache.py fills a cache."""
    model = ModelConfig(moe=MoEConfig(num_experts=experts, top_k=top_k, capacity_factor=capacity))
    assert layers * layer_bytes(model) == expected


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["replay.kind=r2"], RouteBytes(device=TOKENS * 4 * 8)),
        (["replay.kind=none"], RouteBytes(device=TOKENS * 4 * 8)),
        (["replay.kind=r3"], RouteBytes(device=TOKENS * 4 * 8)),
        (["replay.kind=r2", "replay.observe_rollout=true"], RouteBytes(device=2 * TOKENS * 4 * 8)),
        (["replay.kind=r2", "replay.store=pinned"], RouteBytes(host=TOKENS * 4 * 8)),
        (["rl.update.old_logprobs=rollout"], RouteBytes()),
        (["rl.loss.kind=rspo"], RouteBytes(device=TOKENS * 4 * 8 * 7)),
    ],
)
def test_a_rank_s_routes_go_to_the_memory_of_the_config(words, wanted):
    assert routes_of_rank(training(*words), 0) == wanted


def test_meshes_divide_the_routes_and_the_estimate_counts_them():
    whole = TOKENS * 4 * 8
    for mesh, world in (
        (["mesh.pp=2"], 2),
        (["mesh.tp=2", "mesh.ep=2"], 2),
        (["mesh.cp=2"], 2),
        (["mesh.dp=2"], 2),
    ):
        assert routes_of_rank(training("replay.kind=r2", *mesh, world=world), 0).device == whole // 2
    pinned, stored = (
        memory_by_stage(training("replay.kind=r2", f"replay.store={store}"))[0]
        for store in ("pinned", "device")
    )
    assert stored.total - pinned.total == stored.routes == pinned.host_routes == whole
    assert pinned.routes == stored.host_routes == 0
    assert "routes 0.0" in stored.describe() and "routes" not in pinned.describe()
