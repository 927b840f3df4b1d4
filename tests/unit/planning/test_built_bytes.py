"""The closed form of a rank's bytes against Megatron's own modules, buffers and optimizer of that rank."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.load import kind_of, load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.recipes import RECIPES, recipe_files
from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.model.build import build_model
from mcore_rl.planning.memory import memory_by_stage
from mcore_rl.planning.training import training_of
from mcore_rl.planning.weights import view_of_rank
from mcore_rl.rl.engines.native.decoder import Decoder
from tests.fake_world import buildable, bytes_of_rank, fake_platform, fake_rank, on_meta, storage_bytes
from tests.ranks import run_ranks
from tests.tiny_models import TINY

MESHES = [
    *((family, "bf16", {"tp": 2, "ep": 2, "pp": 4}, 8, 0) for family in ("qwen3_moe", "deepseek_v3", "qwen2_moe")),
    ("gpt_oss", "fp32", {"pp": 2, "ep": 2, "tp": 2}, 4, 0),
    ("deepseek_v3", "bf16", {"pp": 2, "vpp": 2, "ep": 4, "etp": 2, "tp": 2}, 16, 0),
    ("deepseek_v3", "bf16", {"pp": 4, "tp": 1}, 4, 1),
    ("qwen3_moe", "bf16", {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 3}, 2, 0),
    ("deepseek_v3", "bf16", {"pp": 2, "vpp": 2, "pp_layout": "balanced"}, 2, 1),
    ("qwen3_moe", "bf16", {"pp": 2, "vpp": 2, "pp_layout": (2, 1, 1, 0)}, 2, 0),
    ("llama", "fp32", {"pp": 4, "tp": 2}, 8, 0),
    ("qwen3_moe-score", "bf16", {"tp": 2, "pp": 2, "ep": 2}, 4, 0),
    ("gpt_oss-score", "bf16", {"pp": 2}, 2, 0),
    ("olmoe", "bf16", {"tp": 2, "cp": 2, "ep": 4}, 4, 0),
]  # fmt: skip
HAS_SHORT_WEIGHTS = ("tiny_moe", "qwen3_next")
"""Recipes with weights that are shorter than the buffer's alignment: narrow ones, and the decays of delta nets."""
INDEXED = [
    ("deepseek_v32", "bf16", {"tp": 2, "ep": 2, "pp": 2}, 4, 1),
    ("glm_moe_dsa", "fp32", {"pp": 2, "tp": 2, "ep": 2}, 4, 0),
]
SERVED_BASES = {"qwen3_30b_a3b/grpo_r3_shared_lora": 30_532_122_624 * 2 // 4}
"""Bytes of a server's base in main memory, on each of its four GPUs: the published parameters, in bf16."""
NOTHING = {"weights": 0, "gradients": 0, "optimizer": 0, "main memory": 0}


def config_of(family, precision, mesh, mtp_layers):
    family, _, head = family.partition("-")
    model = TINY[family].model_copy(update={"mtp_layers": mtp_layers} if mtp_layers else {})
    if family == "gpt_oss":
        model = model.model_copy(update={"tied_embeddings": True})
    if head:
        model = model.model_copy(update={"head": head})
    config = load_config(PretrainConfig, None, [f"platform.precision={precision}", "mesh.dp=auto"])
    return config.model_copy(
        update={"model": model, "mesh": config.mesh.model_copy(update=mesh)}
    )  # fmt: skip


@cache
def recipe(name):
    path = recipe_files(RECIPES)[name]
    program = PROGRAMS[kind_of(path, ())]
    config = load_config(program.config, path)
    if config.platform.precision == "auto":  # ranks decide it by their device, which is a CPU here
        config = load_config(program.config, path, ("platform.precision=fp32",))
    return program, config


KINDS = {
    name: kind_of(path, ())
    for name, path in recipe_files(RECIPES).items()
    # The command names the model of any_model's.
    if not name.endswith("/model") and not name.startswith("any_model/")
}


def recipes_of(*kinds):
    return [name for name, kind in KINDS.items() if kind in kinds]


def training(config, world, seq_length=64):
    return replace(training_of(config, world), seq_length=seq_length)


def built(config, world, ranks, updated=None):
    return [bytes_of_rank(training(config, world), rank, updated) for rank in ranks]


def excesses(config, world, seq_length, ranks):
    """What the closed form has more than each rank, and the gaps between its weights."""
    stages = memory_by_stage(training(config, world, seq_length))
    counted = run_ranks(built, 1, config, world, ranks)[0]
    return [(one.excess(stages[one.stage], config.platform), one.gaps) for one in counted]


@pytest.mark.matrix("gpt_oss-score-bf16-{'pp': 2}")
@pytest.mark.parametrize("case", MESHES + INDEXED, ids=lambda case: "-".join(map(str, case[:3])))
def test_every_stage_of_every_mesh_has_the_bytes_that_megatron_builds(case):
    *shape, world, mtp_layers = case
    config, pp = config_of(*shape, mtp_layers), shape[2].get("pp", 1)
    # The last rank of each stage, whose experts and heads are the last ones.
    ranks = [(stage + 1) * world // pp - 1 for stage in range(pp)]
    for excess, gaps in excesses(config, world, 64, ranks):
        assert excess | {"optimizer": 0} == NOTHING
        # Gaps make the shares of the first ranks larger, by no more than they are long.
        assert abs(excess["optimizer"]) <= 12 * gaps


@pytest.mark.matrix("gpt_oss-score-bf16-{'pp': 2}-fused")
@pytest.mark.parametrize("gate_up", ["fused", "split"])
@pytest.mark.parametrize("case", MESHES, ids=lambda case: "-".join(map(str, case[:3])))
def test_low_rank_adapters_have_the_bytes_that_megatron_builds(case, gate_up):
    *shape, world, mtp_layers = case
    config, pp = config_of(*shape, mtp_layers), shape[2].get("pp", 1)
    config = config.model_copy(update={"lora": LoraConfig(rank=8, expert_gate_up=gate_up)})
    ranks = [(stage + 1) * world // pp - 1 for stage in range(pp)]
    whole = memory_by_stage(training(config.model_copy(update={"lora": LoraConfig()}), world))
    for (excess, gaps), one in zip(excesses(config, world, 64, ranks), whole, strict=True):
        assert excess | {"optimizer": 0} == NOTHING
        assert abs(excess["optimizer"]) <= 12 * gaps
        assert memory_by_stage(training(config, world))[one.stage].gradients < one.gradients / 2


@pytest.mark.full
@pytest.mark.parametrize("name", recipes_of(*PROGRAMS))
def test_a_recipe_has_the_bytes_that_megatron_builds_on_its_first_middle_and_last_stage(name):
    program, config = recipe(name)
    world, pp = config.mesh.smallest_world, config.mesh.pp
    program.check(config, world)
    ranks = [stage * world // pp for stage in sorted({0, pp // 2, pp - 1})]
    for excess, gaps in excesses(config, world, config.packed_length, ranks):
        assert excess | {"optimizer": 0} == NOTHING | {"main memory": SERVED_BASES.get(name, 0)}
        assert abs(excess["optimizer"]) <= 12 * gaps
        assert gaps == 0 or name.startswith(HAS_SHORT_WEIGHTS)


@pytest.mark.full
@pytest.mark.parametrize(
    "fields", [{"exp_avg_dtype": "bf16"}, {"exp_avg_sq_dtype": "bf16", "main_grads_dtype": "bf16"}]
)
def test_a_precision_aware_optimizer_has_the_bytes_that_megatron_builds(fields):
    config = config_of("qwen3_moe", "bf16", {"tp": 2, "ep": 2, "pp": 2}, 0)
    optim = config.optim.model_copy(update=fields)
    config = config.model_copy(update={"optim": optim})
    stages = memory_by_stage(training(config, 4))
    counted, last = run_ranks(built, 1, config, 4, [1, 3])[0]
    assert [one.excess(stages[one.stage], config.platform) for one in (counted, last)] == [NOTHING, NOTHING]
    # Of each weight: 4 bytes of its copy in fp32, 4 and 2 of its moments, 4 or 2 of its gradient.
    assert counted.optimizer == 10 * counted.numbers
    of_gradient = 2 if "main_grads_dtype" in fields else 4
    assert counted.gradients == of_gradient * (counted.numbers + counted.gaps)


@pytest.mark.matrix("gpt_oss-fp32-{'pp': 2, 'ep': 2, 'tp': 2}")
@pytest.mark.parametrize(
    "case", [*MESHES, ("qwen3_next", "bf16", {"pp": 2, "tp": 2}, 4, 0)], ids=lambda case: "-".join(map(str, case[:3]))
)
def test_muon_has_the_bytes_that_megatron_builds_on_every_data_parallel_rank(case):
    pytest.importorskip("emerging_optimizers", reason="Muon needs Python 3.12 and emerging-optimizers")
    *shape, world, mtp_layers = case
    config, pp = config_of(*shape, mtp_layers), shape[2].get("pp", 1)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"kind": "muon"})})
    ranks = [(stage + 1) * world // pp - 1 for stage in range(pp)]
    assert [excess for excess, _ in excesses(config, world, 64, ranks)] == [NOTHING] * pp


@pytest.mark.full
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_a_hybrid_optimizer_has_the_bytes_that_megatron_puts_into_main_memory(fraction):
    config = config_of("qwen3_moe", "bf16", {"tp": 2, "ep": 2, "pp": 2}, 0)
    optim = config.optim.model_copy(update={"offload_fraction": fraction})
    config = config.model_copy(update={"optim": optim})
    (counted,) = run_ranks(built, 1, config, 4, [1])[0]
    on_device, on_host = counted.optimizer // 12, counted.host_optimizer // 16
    assert on_device + on_host == counted.numbers
    # Whole weights go to main memory: the last of the dense ones, and of the experts, goes beyond the fraction.
    largest = config.model.padded_vocab_size * config.model.hidden_size // 2
    assert 0 <= on_host - fraction * counted.numbers < (2 * largest if fraction < 1 else 1)
    if fraction == 1:
        assert counted.excess(memory_by_stage(training(config, 4))[0], config.platform) == NOTHING


@pytest.mark.full
def test_a_rank_of_16384_has_the_bytes_of_the_closed_form():
    config = recipe("deepseek_v3/pretrain")[1]
    for excess, gaps in excesses(config, 16384, 4096, [0, 8192]):
        assert (excess, gaps) == (NOTHING, 0)


@pytest.mark.full
def test_models_that_wait_in_main_memory_have_the_bytes_that_megatron_builds():
    words = ("rl.advantage.critic.store=host", "rl.update.store=host", "platform.precision=fp32")
    config = load_config(RlRunConfig, recipe_files(RECIPES)["tiny_moe/ppo"], words)
    world = config.mesh.smallest_world
    (stage,) = memory_by_stage(training(config, world))
    # Counted in the update that needs most: its model is on the device, and the other one waits.
    (counted,) = run_ranks(built, 1, config, world, [0], stage.updated)[0]
    excess = counted.excess(stage, config.platform)
    assert counted.host > 0 and excess | {"main memory": 0} == NOTHING
    # The weights that wait have gaps as well, of 2 bytes each.
    assert -2 * counted.gaps <= excess["main memory"] <= 0


@pytest.mark.full
@pytest.mark.parametrize("world", [3, 5])
def test_the_shares_of_an_odd_number_of_ranks_are_together_the_whole_state(world):
    config = config_of("llama", "bf16", {}, 0)
    counted = run_ranks(built, 1, config, world, range(world))[0]
    (one,) = memory_by_stage(training(config, 1))
    assert len({rank.optimizer for rank in counted}) > 1 and counted[0].gaps > 0
    assert sum(rank.optimizer for rank in counted) == one.optimizer
    assert all(rank.weights - 2 * rank.gaps == one.weights for rank in counted)


@pytest.mark.full
def test_routers_that_are_frozen_have_neither_gradients_nor_a_state():
    words = ("rl.freeze_router=true", "model.moe.aux_loss_coeff=0", "platform.precision=bf16")
    frozen = load_config(RlRunConfig, recipe_files(RECIPES)["tiny_moe/gspo"], words)
    free = load_config(RlRunConfig, recipe_files(RECIPES)["tiny_moe/gspo"], words[1:])
    (frozen_excess, _), (free_excess, _) = (excesses(config, 2, 64, [0])[0] for config in (frozen, free))
    assert frozen_excess["weights"] == frozen_excess["gradients"] == free_excess["gradients"] == 0
    numbers = [memory_by_stage(training(config, 2))[0].gradients // 4 for config in (free, frozen)]
    moe = free.model.moe
    assert numbers[0] - numbers[1] == sum(free.model.moe_layers) * moe.num_experts * free.model.hidden_size


def cache_bytes(config):
    """Bytes of the native engine's caches on a rank of each stage."""
    found, world = [], config.mesh.smallest_world
    slots = min(config.rl.engine.native_slots, config.rollout_size * config.mesh.model_parallel // world)
    for stage in range(config.mesh.pp):
        with fake_rank(config.mesh, stage * world // config.mesh.pp, world) as mesh, on_meta():
            platform = fake_platform(config.platform, mesh)
            chunks = build_model(buildable(config.model), mesh, platform, config.platform)
            decoder = Decoder(chunks, mesh, slots, config.longest_sample, with_routes=False)
            found.append(
                storage_bytes(
                    tensor
                    for chunk in decoder._caches
                    for cache in chunk
                    for field in fields(cache)
                    if isinstance(tensor := getattr(cache, field.name), torch.Tensor)
                )
            )
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", recipes_of("rl"))
def test_the_rollout_cache_is_that_of_the_engine(name):
    _, config = recipe(name)
    if config.rl.engine.is_served:
        config = config.model_copy(update={"rl": config.rl.model_copy(update={"engine": NativeConfig()})})
    planned = memory_by_stage(training_of(config, config.mesh.smallest_world))
    assert [stage.rollout_cache for stage in planned] == run_ranks(cache_bytes, 1, config)[0]


MODEL = ModelConfig(num_layers=8, moe=MoEConfig(num_experts=16, ffn_hidden_size=8))
WORLDS = (
    (MeshConfig(tp=2, cp=2, pp=2, vpp=2, ep=4, etp=2, dp="auto"), 32),
    (MeshConfig(tp=4, pp=4, ep=2, dp="auto"), 32),
    (MeshConfig(ep=8, dp="auto"), 16),
)
RANKS = (0, 5, 11)
AXES = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "ep": "ep", "etp": "etp", "copy": "expert_dp"}


def groups_of_megatron():
    """Index and ranks of every axis, by mesh and rank."""
    found = []
    for config, world in WORLDS:
        for rank in RANKS:
            with fake_rank(config, rank, world) as mesh:
                axes = {name: getattr(mesh, axis) for name, axis in AXES.items()}
                found.append(
                    {name: (axis.rank, tuple(dist.get_process_group_ranks(axis.group))) for name, axis in axes.items()}
                )
    return found


@pytest.fixture(scope="module")
def groups():
    cases = [(config, world, rank) for config, world in WORLDS for rank in RANKS]
    return list(zip(cases, run_ranks(groups_of_megatron, 1)[0], strict=True))


def test_a_rank_has_the_coordinates_and_groups_that_megatron_gives_it(groups):
    for (config, world, rank), expected in groups:
        view = view_of_rank(MODEL, config, rank, world, 8)
        planned = {
            name: (index, view.groups[name].ranks if name in view.groups else (rank,))
            for name, index in view.coordinates.items()
        }
        assert planned == expected


def test_a_rank_knows_its_layers_its_experts_and_what_crosses_nodes():
    view = view_of_rank(MODEL, WORLDS[0][0], 29, 32, 8)
    assert view.node == 3
    assert (view.layers, view.experts) == ((2, 3, 6, 7), range(8, 12))
    assert {name: group.num_nodes for name, group in view.groups.items()} == {
        "tp": 1,
        "cp": 1,
        "dp": 2,
        "pp": 2,
        "etp": 1,
        "ep": 1,
        "copy": 2,
    }
