"""The arguments in a checkpoint for Megatron-LM are those that its command line takes to train such a model."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from mcore_rl.config.model import RopeConfig
from mcore_rl.families import FAMILIES
from mcore_rl.storage.megatron_lm import args_changes, model_args, read_args
from tests.tiny_models import TINY

DENSE = {"num_experts": None, "swiglu": True, "quick_geglu": False, "add_bias_linear": False}
SOFTMAX = {"num_experts": 8, "swiglu": True, "add_bias_linear": False, "moe_router_dtype": "fp32"}
SIGMOID = SOFTMAX | {"moe_router_score_function": "sigmoid"}
LATENT = {"multi_latent_attention": True, "group_query_attention": False, "num_query_groups": 1}
GROUPED = {"multi_latent_attention": False, "group_query_attention": True}
GATED = GROUPED | {
    "qk_layernorm": True,
    "attention_output_gate": True,
    "apply_layernorm_1p": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 0, 1, 0],
    "linear_num_value_heads": 8,
}
WANTED: dict[str, dict[str, Any]] = {
    "llama": DENSE | GROUPED | {"add_qkv_bias": False, "qk_layernorm": False},
    "qwen2": DENSE | GROUPED | {"add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": DENSE | GROUPED | {"add_qkv_bias": False, "qk_layernorm": True},
    "qwen3_moe": SOFTMAX | GROUPED | {"add_qkv_bias": False, "qk_layernorm": True, "moe_layer_freq": 1},
    "mixtral": SOFTMAX | GROUPED | {"num_experts": 4, "qk_layernorm": False, "moe_router_pre_softmax": False},
    "olmoe": SOFTMAX | GROUPED | {"qk_layernorm": True},
    "qwen2_moe": SOFTMAX | GROUPED | {"add_qkv_bias": True, "moe_shared_expert_gate": True},
    "glm4_moe": SIGMOID | GROUPED | {"moe_router_enable_expert_bias": True},
    "deepseek_v2": SOFTMAX | LATENT | {"qk_layernorm": True, "moe_router_pre_softmax": True},
    "deepseek_v3": SIGMOID | LATENT | {"qk_layernorm": True, "moe_router_enable_expert_bias": True},
    "glm4_moe_lite": SIGMOID | LATENT | {"qk_layernorm": True, "moe_router_enable_expert_bias": True},
    "deepseek_v32": SIGMOID | LATENT | {"experimental_attention_variant": "dsa", "dsa_indexer_topk": 8},
    "glm_moe_dsa": SIGMOID | LATENT | {"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 4},
    "dots1": SIGMOID | GROUPED | {"qk_layernorm": True, "moe_router_enable_expert_bias": True},
    "solar_open": SIGMOID | GROUPED | {"qk_layernorm": False, "moe_layer_freq": 1},
    "minimax_m2": SIGMOID | GROUPED | {"qk_layernorm": True, "moe_router_enable_expert_bias": True},
    "seed_oss": DENSE | GROUPED | {"add_qkv_bias": True, "qk_layernorm": False},
    "mistral": DENSE | GROUPED | {"add_qkv_bias": False, "qk_layernorm": False},
    "qwen3_next": SOFTMAX | GATED | {"moe_shared_expert_gate": True},
    "qwen3_5_moe_text": SOFTMAX | GATED | {"moe_shared_expert_gate": True},
    "qwen3_5_text": DENSE | GATED,
    "gpt_oss": GROUPED
    | {
        "num_experts": 8, "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0, "add_bias_linear": True, "add_qkv_bias": True, "qk_layernorm": False,
        "softmax_type": "learnable", "window_size": (7, 0), "window_attn_skip_freq": 2,
        "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 32.0,
        "yarn_correction_range_round_to_int": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_arguments_describe_the_model_in_plain_values(family: str) -> None:
    model = TINY[family]
    args = vars(model_args(model))
    assert {name: args[name] for name in WANTED[family]} == WANTED[family]
    assert (args["num_layers"], args["hidden_size"]) == (model.num_layers, model.hidden_size)
    assert (args["num_attention_heads"], args["ffn_hidden_size"]) == (model.num_heads, model.ffn_hidden_size)
    assert args["padded_vocab_size"] == model.padded_vocab_size and args["normalization"] == "RMSNorm"
    assert (args["norm_epsilon"], args["rotary_base"]) == (model.norm_eps, model.rope.theta)
    for name, value in args.items():
        parts = value if isinstance(value, list | tuple) else [value]
        assert all(part is None or type(part) in (bool, int, float, str) for part in parts), name


def test_the_arguments_have_experts_dense_layers_and_mtp() -> None:
    model = TINY["deepseek_v3"]
    args = model_args(model.model_copy(update={"mtp_layers": 1}))
    assert args.moe_layer_freq == [0, *[1] * (model.num_layers - 1)] and args.mtp_num_layers == 1
    assert args.moe_shared_expert_intermediate_size == model.moe.shared_width
    assert args.q_lora_rank == model.mla.q_lora_rank and args.kv_lora_rank == model.mla.kv_lora_rank


VARIANTS = TINY | {
    "llama stretched": TINY["llama"].model_copy(
        update={"rope": RopeConfig(scaling="llama3", factor=32.0, original_length=8192)}
    ),
    "deepseek_v3 stretched": TINY["deepseek_v3"].model_copy(
        update={"rope": RopeConfig(scaling="yarn", factor=40.0, mscale_all_dim=1.0)}
    ),
}


IN_PART = {
    "glm4_moe stretched": TINY["glm4_moe"].model_copy(
        update={"rope": RopeConfig(scaling="yarn", factor=4.0, fraction=0.5)}
    )
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_arguments_of_a_model_are_of_no_other_model(name: str) -> None:
    model = VARIANTS[name]
    assert args_changes(vars(model_args(model)), model) == []
    assert args_changes({}, model) == []


@pytest.mark.parametrize(
    ("name", "args", "reported"),
    [
        ("qwen3_moe", {"rotary_base": 10_000_000}, ["model.rope.theta is 10000000.0 there, 10000.0 here"]),
        ("qwen3_moe", {"norm_epsilon": 1e-5}, ["model.norm_eps is 1e-05 there, 1e-06 here"]),
        ("qwen3_moe", {"moe_router_topk": 4}, ["model.moe.top_k is 4 there, 2 here"]),
        ("qwen3_moe", {"moe_router_pre_softmax": True}, ["model.moe.normalize_top_k is false there, true here"]),
        (
            "qwen3_moe",
            {"moe_router_score_function": "sigmoid"},
            ['model.family is "moe_router_score_function=sigmoid" there, "qwen3_moe" here'],
        ),
        ("qwen3_moe", {"window_size": (7, 0)}, ['model.sliding_window is 8 there, "none" here']),
        ("deepseek_v3", {"moe_router_topk_scaling_factor": None}, ["model.moe.routed_scaling is 1.0 there, 2.5 here"]),
        ("deepseek_v3", {"moe_router_num_groups": None}, ['model.moe.num_groups is "none" there, 4 here']),
        ("deepseek_v3", {"moe_router_group_topk": 1}, ["model.moe.top_groups is 1 there, 2 here"]),
        # Megatron's latent attention is YaRN where nothing is said, and YaRN of the factor 1 is none.
        ("deepseek_v3", {"rope_type": None, "rotary_scaling_factor": 1.0}, []),
        (
            "deepseek_v3",
            {"rope_type": None, "rotary_scaling_factor": 40.0},
            ['model.rope.scaling is "yarn" there, "none" here'],
        ),
        (
            "deepseek_v3 stretched",
            {"rotary_scaling_factor": 20.0, "mscale_all_dim": 0.707},
            ["model.rope.factor is 20.0 there, 40.0 here", "model.rope.mscale_all_dim is 0.707 there, 1.0 here"],
        ),
        ("llama stretched", {"use_rope_scaling": False}, ['model.rope.scaling is "none" there, "llama3" here']),
        ("llama stretched", {"rope_scaling_factor": 8.0}, ["model.rope.factor is 8.0 there, 32.0 here"]),
        ("llama", {"use_rope_scaling": True}, ['model.rope.scaling is "llama3" there, "none" here']),
        ("llama", {"rotary_percent": 0.5}, ["model.rope.fraction is 0.5 there, 1.0 here"]),
        ("llama", {"rotary_interleaved": True}, ['model.family is "rotary_interleaved=True" there, "llama" here']),
        ("llama", {"swiglu": False}, ['model.family is "swiglu=False" there, "llama" here']),
        # Megatron-LM's defaults of what a dense model does not have, and settings of training.
        ("llama", {"moe_router_topk": 2, "moe_router_score_function": "softmax", "hidden_dropout": 0.1}, []),
        (
            "gpt_oss",
            {"yarn_beta_fast": 8.0, "window_size": (15, 0)},
            ["model.sliding_window is 16 there, 8 here", "model.rope.beta_fast is 8.0 there, 32.0 here"],
        ),
        # Its YaRN turns whole heads, which rotary_percent does not change.
        ("glm4_moe stretched", {}, ["model.rope.fraction is 1.0 there, 0.5 here"]),
        ("gpt_oss", {"position_embedding_type": "rope"}, ['model.rope.scaling is "none" there, "yarn" here']),
    ],
    ids=str,
)
def test_arguments_of_another_model_are_reported(name: str, args: dict[str, Any], reported: list[str]) -> None:
    model = (VARIANTS | IN_PART)[name]
    changes = args_changes(vars(model_args(model)) | args, model)
    assert list(map(str, changes)) == reported


def test_the_arguments_of_a_checkpoint_are_read_without_its_objects(tmp_path: Path) -> None:
    args = Namespace(rotary_base=10_000, backend=AttnBackend.auto, window_size=(3, 0), data_path=["1.0"])
    torch.save({"args": args, "iteration": 7}, tmp_path / "common.pt")
    assert read_args(tmp_path) == {"rotary_base": 10_000, "window_size": (3, 0), "data_path": ["1.0"]}
    torch.save({"iteration": 7}, tmp_path / "common.pt")
    assert read_args(tmp_path) == {}
    (tmp_path / "common.pt").unlink()
    assert read_args(tmp_path) == {}
