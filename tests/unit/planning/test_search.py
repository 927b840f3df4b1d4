import functools
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from mcore_rl.checks.cluster import placement
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.load import load_config
from mcore_rl.planning.device import DEVICES, Rates
from mcore_rl.planning.estimate import Place, estimate
from mcore_rl.planning.layer_times import workload_of
from mcore_rl.planning.memory import GIB, memory_of_fullest_rank
from mcore_rl.planning.search import configured, search, toml_lines
from mcore_rl.planning.step import step
from mcore_rl.planning.training import training_of

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"


def load(name, *overrides):
    program = PROGRAMS["rl" if "grpo" in name else "pretrain"]
    return program, load_config(program.config, RECIPES / f"{name}.toml", overrides)


@functools.cache
def searched(name, world, room_gib=73.6, device="H100", overrides=()):
    _, config = load(name, *overrides)
    return search(config, world, place(room_gib, device))


def place(room_gib=73.6, device="H100"):
    return Place(ranks_per_node=8, room_bytes=room_gib * GIB, device=device and DEVICES[device])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world", "overrides"),
    [
        ("qwen3_30b_a3b/grpo_r2", 16, ()),
        ("llama3_8b/pretrain", 24, ("train.global_batch=480",)),
        ("deepseek_v3_small/pretrain", 96, ("train.global_batch=3072",)),
    ],
)
def test_a_search_proposes_only_what_the_checks_accept_and_what_fits(name, world, overrides):
    program, config = load(name, *overrides)
    where = place()
    found = searched(name, world, overrides=overrides)
    assert found.tried == found.refused + found.too_large + len(found.choices)
    assert found.choices
    for choice in found.choices[::9]:
        chosen = configured(config, choice.training)
        program.check(chosen, world)
        assert not placement(config.model, choice.mesh, 8, world).refused
        again = replace(training_of(chosen, world), seq_length=config.packed_length)
        assert again == choice.training
        assert memory_of_fullest_rank(again).total <= where.room_bytes
    seconds = [choice.seconds for choice in found.choices]
    assert seconds == sorted(seconds)


@pytest.mark.full
def test_the_fields_of_a_choice_make_its_config():
    found = searched("qwen3_30b_a3b/grpo_r2", 16)
    for choice in found.shortlist():
        _, again = load("qwen3_30b_a3b/grpo_r2", *toml_lines(found.changes(choice)))
        assert (again.mesh, again.train.micro_batch) == (choice.mesh, choice.training.micro_batch)
        assert again.platform.recompute == choice.training.platform.recompute


PINNED = ("replay.store=pinned",)
"""On eight of these GPUs the routes of a rollout batch have to wait in main memory."""


@pytest.mark.full
def test_more_memory_never_fits_fewer_and_a_search_gives_the_same_twice():
    _, config = load("qwen3_30b_a3b/grpo_r2", *PINNED)
    small, large = (searched("qwen3_30b_a3b/grpo_r2", 8, room, overrides=PINNED).choices for room in (73.6, 134.4))
    assert 0 < len(small) < len(large)
    assert search(config, 8, place()).choices == small


@pytest.mark.full
def test_the_published_mesh_of_mixtral_is_among_the_fastest():
    _, config = load("mixtral_8x7b/pretrain")
    found = searched("mixtral_8x7b/pretrain", 64)
    published = step(workload_of(training_of(config, 64), DEVICES["H100"], Rates())).seconds
    assert published <= 1.03 * found.choices[0].seconds


def test_the_published_mesh_of_qwen3_30b_is_among_the_fastest_that_leave_room():
    """16 H100 with tp 1 x pp 1 x ep 16, fp8 (Megatron-Bridge 26.04.01)."""
    fp8 = ("train.global_batch=1024", "platform.fp8=hybrid", "model.moe.dispatcher=deepep")
    choices = searched("qwen3_30b_a3b/pretrain", 16, overrides=fp8).with_spare()
    of_mesh = (one for one in choices if (one.mesh.tp, one.mesh.pp, one.mesh.cp, one.mesh.ep) == (1, 1, 1, 16))
    assert next(of_mesh).seconds <= 1.03 * choices[0].seconds
    assert max(one.memory.total for one in choices) <= 0.96 * 73.6 * GIB


@pytest.mark.full
def test_reinforcement_learning_is_searched_by_its_whole_step():
    found, where = searched("qwen3_30b_a3b/grpo_r2", 16), place()
    for choice in found.choices[::250]:
        # The same as the plan of that config, which shares no part with others.
        alone = estimate(choice.training, where).rl
        assert choice.rl == alone and choice.seconds == pytest.approx(sum(alone.parts.values()))
    # Half as many replicas generate with as many slots each: what a faster update gains a rollout may lose.
    updates = [choice.rl.parts["updates"] for choice in found.choices]
    assert updates != sorted(updates)
    served = ("rl.engine.kind=vllm", "rl.engine.tensor_parallel=4", "rl.engine.urls=[http://a:1]")
    _, config = load("qwen3_30b_a3b/grpo_r2", *served)
    with_servers = search(config, 16, replace(where, server_gpus=16)).choices[0]
    assert "weights to servers" in with_servers.rl.parts


@pytest.mark.full
def test_the_nearest_change_little_and_fit():
    found, where = searched("qwen3_30b_a3b/grpo_r2", 8, overrides=PINNED), place()
    assert memory_of_fullest_rank(found.training).total > where.room_bytes
    near = found.nearest()
    # No mesh leaves 4 % of the device; then what may wait in main memory is proposed beside what fits narrowly.
    narrow = [choice.memory.total for choice in found.choices if not choice.training.optim.offload_fraction]
    assert narrow and min(narrow) > 0.96 * where.room_bytes
    assert all(choice.memory.total <= where.room_bytes for choice in near)
    layouts = {(choice.mesh.tp, choice.mesh.pp, choice.mesh.ep, choice.mesh.cp) for choice in near}
    assert 0 < len(near) <= 3 and len(layouts) == len(near)
    assert found.changes(near[0]) == {"optim.offload_fraction": 1.0}


@pytest.mark.full
def test_without_a_device_what_recomputes_and_exchanges_least_comes_first():
    first = searched("qwen3_30b_a3b/grpo_r2", 8, inf, None).choices[0]
    assert first.seconds is None
    assert (first.mesh.model_parallel, first.training.platform.recompute) == (1, "none")


@pytest.mark.full
def test_a_world_of_16384_is_searched():
    _, config = load("deepseek_v3/pretrain", "train.global_batch=16384")
    found = search(config, 16384, place())
    assert found.choices and found.shortlist()


@pytest.mark.full
def test_main_memory_that_is_known_and_too_small_is_no_room_for_what_waits_there():
    _, config = load("qwen3_30b_a3b/grpo_r2")
    where = place()
    # 16 bytes for each of 30.5e9 weights are 455 GiB.
    for host_gib, waiting in ((400, None), (500, 1.0)):
        narrow = replace(where, room_bytes=60 * GIB, host_bytes=host_gib * GIB)
        fractions = {choice.training.optim.offload_fraction for choice in search(config, 8, narrow).choices}
        assert fractions == ({waiting} if waiting else set())
