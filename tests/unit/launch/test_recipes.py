import re

import pytest

from mcore_rl.checks.inputs import inputs_of
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import kind_of, load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.launch.planning import Allowances, check_training
from mcore_rl.planning.device import parse_gpus
from mcore_rl.planning.estimate import estimate, place_of
from mcore_rl.planning.memory import GIB
from mcore_rl.planning.training import training_of
from tests.unit.launch.conftest import ROOT

RECIPES = ROOT / "launch/recipes"
FILES = sorted(
    path
    for path in RECIPES.glob("*/*.toml")
    if path.stem != "model" and path.parent.name not in ("tiny_moe", "any_model")
)
LARGE = ("qwen3_30b_a3b", "qwen3_235b_a22b", "mixtral_8x7b", "deepseek_v3")
BARE = ["container.kind=none", *(f"container.{name}=none" for name in ("image", "mounts", "options"))]
H100 = load_config(ClusterConfig, ROOT / "launch/clusters/example_h100.toml", BARE)
ONE_GPU = load_config(ClusterConfig, ROOT / "launch/clusters/example_1gpu.toml")
FIT_PEOPLE = (
    "qwen3_30b_a3b/grpo_lora", "qwen3_30b_a3b/grpo_r2_1node", "qwen3_30b_a3b/grpo_r3_shared_lora",
    "qwen3_30b_a3b/sft_1node", "olmoe_1b_7b/grpo_r2", "olmoe_1b_7b/grpo_r2_1gpu", "olmoe_1b_7b/sft",
    "olmoe_1b_7b/sft_1gpu", "moonlight_16b_a3b/grpo_r2", "moonlight_16b_a3b/sft",
)  # fmt: skip
NODES = {"deepseek_v3_small/pretrain": 2, "llama3_8b/pretrain": 1}


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


def documented_nodes(path):
    """`gspo.toml` is run on as many nodes as what it extends."""
    text = path.read_text()
    found = re.search(r"\b(\d+) (?:nodes? of 8 GPUs|GPU) of 80 GB", text)
    if found or name_of(path) in NODES:
        return int(found[1]) if found else NODES[name_of(path)]
    base = re.search('^extends = "(.*)"', text, re.MULTILINE)[1]
    return documented_nodes(path.with_name(base))


def cluster_of(path):
    return ONE_GPU if path.stem.endswith("_1gpu") else H100


@pytest.mark.full
@pytest.mark.parametrize("name", FIT_PEOPLE)
def test_rl_and_fine_tuning_of_small_models_fit_on_one_node_or_one_gpu_with_room_to_spare(name):
    path = RECIPES / f"{name}.toml"
    cluster, (_, config) = cluster_of(path), load(path)
    assert documented_nodes(path) == 1
    plan = estimate(training_of(config, cluster.node.ranks_per_node), place_of(cluster))
    assert plan.fits and plan.fullest.total <= 0.85 * plan.place.room_bytes
    stated = re.search(r"(\d+) GiB of main memory, .* takes (\d+)", comment_of(path))
    assert bool(stated) == bool(config.optim.offload_fraction)
    if stated:
        assert plan.fullest_node_bytes <= int(stated[1]) * GIB
        assert round(plan.fullest.host_optimizer * plan.place.ranks_per_node / GIB) == int(stated[2])


def test_adapters_of_a_model_of_30_billion_weights_fit_on_two_gpus_and_the_model_not_on_eight():
    """The recipe's mesh on one node; on fewer ranks with the experts of as many."""
    needed = {}
    for name in ("grpo_lora", "grpo_r2"):
        _, config = load(RECIPES / f"qwen3_30b_a3b/{name}.toml")
        for count in (1, 2, 8, 16):
            changes = {"tp": min(config.mesh.tp, count), "ep": min(config.mesh.ep, count)}
            mesh = config.mesh.model_copy(update=changes)
            training = training_of(config.model_copy(update={"mesh": mesh}), count)
            if estimate(training, place_of(parse_gpus(f"{count}xH100").cluster())).fits:
                needed.setdefault(name, count)
    assert needed == {"grpo_lora": 2, "grpo_r2": 16}


def test_adapters_are_trained_as_the_whole_model_but_for_mesh_and_rate():
    _, whole = load(RECIPES / "qwen3_30b_a3b/grpo_r2.toml")
    _, lora = load(RECIPES / "qwen3_30b_a3b/grpo_lora.toml")
    assert lora.optim.lr == pytest.approx(10 * whole.optim.lr)
    checkpoint = lora.checkpoint.model_copy(update={"weights": "all"})
    same = {name: getattr(whole, name) for name in ("lora", "mesh", "optim", "run_dir")}
    assert lora.model_copy(update={**same, "checkpoint": checkpoint}) == whole


def comment_of(path):
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


def load(path):
    program = kind_of(path)
    return PROGRAMS[program], load_config(PROGRAMS[program].config, path)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_recipe_passes_the_preflight_on_the_nodes_that_it_names(path, home):
    _, config = load(path)
    promised = frozenset(file.absolute() for _, file, _ in inputs_of(config))
    cluster = cluster_of(path)
    checked = check_training(config, cluster, documented_nodes(path), Allowances(promised=promised))
    # How much room the disk of this machine has says nothing about the recipe.
    warnings = [warning for warning in checked.warnings if " of disk, and " not in warning]
    assert all("over the network" in warning for warning in warnings), warnings


@pytest.mark.parametrize("model", LARGE)
def test_every_large_model_has_all_stages(model):
    assert {"pretrain", "sft", "grpo_r2", "gspo"} <= {path.stem for path in (RECIPES / model).iterdir()}


@pytest.mark.parametrize("model", LARGE)
def test_grpo_and_gspo_of_a_model_differ_in_the_objective_and_the_replay_alone(model):
    _, grpo = load(RECIPES / model / "grpo_r2.toml")
    _, gspo = load(RECIPES / model / "gspo.toml")
    assert isinstance(grpo, RlRunConfig) and isinstance(gspo, RlRunConfig)
    assert (grpo.rl.loss.kind, grpo.replay.kind) == ("grpo", "r2")
    assert (gspo.rl.loss.kind, gspo.replay.kind, gspo.rl.loss.clip) == ("gspo", "none", (3e-4, 4e-4))
    grpo_loss, gspo_loss = grpo.rl.loss.model_dump(), gspo.rl.loss.model_dump()
    differing = {key for key in grpo_loss.keys() & gspo_loss.keys() if grpo_loss[key] != gspo_loss[key]}
    assert differing == {"kind", "clip_low", "clip_high"}
    same = {"rl": grpo.rl, "replay": grpo.replay, "run_dir": grpo.run_dir}
    rl = gspo.rl.model_copy(update={"loss": grpo.rl.loss})
    assert rl == grpo.rl and gspo.model_copy(update=same) == grpo


@pytest.mark.parametrize("model", LARGE)
def test_a_rollout_makes_four_updates_as_in_the_reports(model):
    _, config = load(RECIPES / model / "grpo_r2.toml")
    assert config.updates_per_rollout == 4
