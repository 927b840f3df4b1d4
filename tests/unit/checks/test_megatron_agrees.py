"""The rules that Megatron checks too stand where it has them: what it takes passes, and the reverse."""

import dataclasses
import itertools

import pytest

import mcore_rl.megatron.patches.table  # noqa: F401

# isort: split
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.checks.model import model_violations
from mcore_rl.config.describe import describe
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.other_names import ARGUMENTS
from mcore_rl.config.run import PlatformConfig, PretrainConfig

OF_THE_SCRIPTS = {
    # Arguments of training/arguments.py, which the wheel does not contain; "no_" ones switch a field of a config off.
    *(
        "no_overlap_p2p_communication",
        "no_gradient_accumulation_fusion",
        "fp8_format",
        "recompute_activations",
        "grad_reduce_in_bf16",
    ),
    *("manual_gc", "manual_gc_interval", "use_torch_fsdp2"),
}


def test_the_names_that_the_config_explains_are_megatrons():
    configs = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    known = {field.name for config in configs for field in dataclasses.fields(config)}
    names = {name for argument in ARGUMENTS for name in argument.names}
    assert names - known == OF_THE_SCRIPTS
    fields = {doc.key for doc in describe(PretrainConfig)}
    assert {argument.field for argument in ARGUMENTS} <= fields | {""}


def megatron_config(**arguments):
    return TransformerConfig(hidden_size=64, add_bias_linear=False, **arguments)


def megatron_takes(**arguments):
    try:
        megatron_config(**arguments)
    except (ValueError, AssertionError):
        return False
    return True


def layers_of_the_chunks(num_layers, mesh):
    """How many layers Megatron puts into each chunk; None where it refuses the mesh."""
    vpp = mesh.vpp if mesh.vpp > 1 else None
    try:
        config = megatron_config(
            num_layers=num_layers,
            num_attention_heads=4,
            pipeline_model_parallel_size=mesh.pp,
            virtual_pipeline_model_parallel_size=vpp,
            num_layers_in_first_pipeline_stage=mesh.first_stage_layers,
            num_layers_in_last_pipeline_stage=mesh.last_stage_layers,
            pipeline_dtype="float32",
        )
        stages = [range(mesh.pp), range(vpp) if vpp else [None]]
        for stage, chunk in itertools.product(*stages):
            get_transformer_layer_offset(config, chunk, stage)
        return [get_num_layers_to_build(config, chunk, stage) for stage, chunk in itertools.product(*stages)]
    except (ValueError, AssertionError, ZeroDivisionError):
        return None


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_are_cut_where_megatron_can_cut_them(pp, vpp):
    outcomes = set()
    for num_layers, first, last in itertools.product(range(2, 13), (None, 1, 2, 3), (None, 1, 2, 3)):
        mesh = MeshConfig(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        ours = not list(mesh_violations(ModelConfig(family="llama", num_layers=num_layers), mesh, 256))
        chunks = layers_of_the_chunks(num_layers, mesh)
        megatrons = chunks is not None and min(chunks) > 0 and sum(chunks) == num_layers
        assert ours == megatrons, (num_layers, first, last, chunks)
        outcomes.add(ours)
    assert outcomes == {True, False}


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_heads_are_cut_where_megatron_can_cut_them(tp):
    for heads, kv_heads in itertools.product((6, 8, 12), (1, 2, 3, 4, 6)):
        if heads % kv_heads:
            continue
        model = ModelConfig(
            family="llama", num_heads=heads, num_kv_heads=kv_heads, vocab_multiple=24, ffn_hidden_size=48
        )
        ours = not list(mesh_violations(model, MeshConfig(tp=tp), 24))
        megatrons = megatron_takes(
            num_layers=4, num_attention_heads=heads, num_query_groups=kv_heads, tensor_model_parallel_size=tp
        )
        assert ours == megatrons, (heads, kv_heads)


@pytest.mark.parametrize(("groups", "chosen"), [*itertools.product((None, 2, 3, 4), (None, 1, 2, 4))])
def test_groups_that_megatron_refuses_are_refused(groups, chosen):
    model = ModelConfig(
        family="deepseek_v3",
        moe=MoEConfig(num_experts=8, top_k=2 * (chosen or 1), ffn_hidden_size=8, num_groups=groups, top_groups=chosen),
    )
    megatrons = megatron_takes(
        num_layers=4,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=8,
        moe_router_topk=2 * (chosen or 1),
        moe_router_score_function="sigmoid",
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
    )
    assert megatrons or list(model_violations(model))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_products_in_8_bits_take_the_multiples_to_which_megatron_pads_experts_tokens(recipe):
    platform = PlatformConfig(fp8="hybrid", fp8_recipe=recipe)
    assert platform.fp8_multiple == get_fp8_align_size(recipe)
    assert PlatformConfig(fp8="hybrid").fp8_multiple % platform.fp8_multiple == 0
    assert PlatformConfig().fp8_multiple == 1
