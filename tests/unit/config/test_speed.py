"""What the flags of speed come to on machines that are and are not here."""

from dataclasses import replace

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, TrainConfig
from mcore_rl.config.speed import Machine, planned_flags, run_flags, speed_flags
from tests.tiny_models import TINY

CPU = Machine(is_cuda=False, has_te_layers=False, world_size=8)
TORCH = Machine(is_cuda=True, has_te_layers=False, world_size=8, capability=9)
HOPPER = Machine(
    is_cuda=True,
    has_te_layers=True,
    world_size=8,
    kernels=frozenset({"permute", "router", "weight gradient"}),
    capability=9,
)
BF16 = PlatformConfig(precision="bf16")


def flags(platform=BF16, mesh=None, model="qwen3_moe", machine=HOPPER, **options):
    return speed_flags(platform, mesh or MeshConfig(), TINY[model], machine, **options)


def test_a_gpu_with_transformer_engine_has_all_of_them_and_the_log_names_each():
    assert flags().describe() == (
        "speed: on: overlap_grad_reduce, overlap_param_gather, permute_fusion, router_fusion, "
        "cross_entropy_fusion=native, weight_gradient_fusion; off: overlap_shared_experts, "
        "fp8_recipe, gc_interval"
    )


def test_a_cpu_has_none():
    assert flags(machine=CPU).describe() == (
        "speed: on: nothing; off: overlap_grad_reduce, overlap_param_gather, overlap_shared_experts, "
        "permute_fusion, router_fusion, cross_entropy_fusion, weight_gradient_fusion, fp8_recipe, gc_interval"
    )


@pytest.mark.parametrize(
    ("mesh", "model", "overlaps"),
    [
        ({"tp": 4, "pp": 2}, "llama", False),
        ({"tp": 4}, "llama", True),
        ({"tp": 8}, "qwen3_moe", True),  # experts with ep = etp = 1 have eight copies
        ({"tp": 8, "ep": 8}, "qwen3_moe", False),
        ({"cp": 8, "ep": 8}, "qwen3_moe", True),  # copies along the sequence are reduced too
    ],
)
def test_reductions_overlap_where_weights_have_copies(mesh, model, overlaps):
    found = flags(mesh=MeshConfig(**mesh), model=model, machine=TORCH)
    assert (found.overlap_grad_reduce, found.overlap_param_gather) == (overlaps, overlaps)


@pytest.mark.parametrize(
    ("reduce", "gather", "machine", "found"),
    [
        ("auto", True, CPU, (True, True)),
        (True, "auto", CPU, (True, False)),
        (False, "auto", TORCH, (False, False)),
        ("auto", False, TORCH, (True, False)),
    ],
)
def test_a_flag_that_is_set_decides_on_the_other(reduce, gather, machine, found):
    mesh = MeshConfig(overlap_grad_reduce=reduce, overlap_param_gather=gather)
    resolved = flags(mesh=mesh, machine=machine)
    assert (resolved.overlap_grad_reduce, resolved.overlap_param_gather) == found


@pytest.mark.parametrize(("stages", "overlaps"), [(1, True), (2, False)])
def test_no_reduction_waits_for_the_embedding_of_layers_that_reinforcement_learning_does_not_train(stages, overlaps):
    model = TINY["deepseek_v3"].model_copy(update={"mtp_layers": 1})
    settings = {"model": model, "mesh": MeshConfig(pp=stages, dp="auto")}
    assert run_flags(RlRunConfig(**settings), TORCH).overlap_grad_reduce == overlaps
    assert run_flags(PretrainConfig(**settings), TORCH).overlap_grad_reduce


@pytest.mark.parametrize(("capability", "recipe"), [(8, "tensorwise"), (9, "blockwise"), (10, "mxfp8"), (12, "mxfp8")])
def test_the_recipe_of_8_bits_is_that_of_the_gpu(capability, recipe):
    machine = Machine(is_cuda=True, has_te_layers=True, world_size=1, capability=capability)
    fp8 = PlatformConfig(precision="bf16", fp8="hybrid")
    assert flags(fp8, machine=machine).fp8_recipe == recipe
    asked = fp8.model_copy(update={"fp8_recipe": "delayed"})
    assert flags(asked, machine=machine).fp8_recipe == "delayed"


def test_fused_kernels_keep_out_of_replay_fp32_and_models_without_experts():
    assert not flags(unfuses_router=True).router_fusion
    assert flags(PlatformConfig()).cross_entropy_fusion == "none"
    dense = flags(model="llama")
    assert (dense.permute_fusion, dense.router_fusion) == (False, False)


@pytest.mark.parametrize(
    ("config", "asked", "machine", "interval"),
    [
        (PretrainConfig, "auto", HOPPER, 100),
        (RlRunConfig, "auto", HOPPER, 1),
        (PretrainConfig, "auto", CPU, None),
        (PretrainConfig, "auto", replace(HOPPER, world_size=1), None),
        (PretrainConfig, 7, CPU, 7),
        (PretrainConfig, None, HOPPER, None),
    ],
)
def test_garbage_is_collected_together_on_several_gpus(config, asked, machine, interval):
    run = config(model=TINY["qwen3_moe"], train=TrainConfig(gc_interval=asked))
    assert run_flags(run, machine).gc_interval == interval


@pytest.mark.parametrize(("device", "overlaps"), [("auto", True), ("cpu", False)])
def test_a_plan_supposes_gpus_unless_the_run_wants_cpus(device, overlaps):
    flags = planned_flags(PlatformConfig(device=device), MeshConfig(), TINY["llama"], 8, trains_mtp=True)
    assert flags.overlap_grad_reduce == overlaps
