"""The arguments in a checkpoint for Megatron-LM are those that its command line takes to train such a model."""

from typing import Any

import pytest

from mcore_rl.checkpoint.megatron_lm import model_args
from mcore_rl.families import FAMILIES
from tests.tiny_models import TINY

DENSE = {"num_experts": None, "swiglu": True, "quick_geglu": False, "add_bias_linear": False}
SOFTMAX = {"num_experts": 8, "swiglu": True, "add_bias_linear": False, "moe_router_dtype": "fp32"}
SIGMOID = SOFTMAX | {"moe_router_score_function": "sigmoid"}
LATENT = {"multi_latent_attention": True, "group_query_attention": False, "num_query_groups": 1}
GROUPED = {"multi_latent_attention": False, "group_query_attention": True}
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
    "gpt_oss": GROUPED
    | {
        "num_experts": 8,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "softmax_type": "learnable",
        "window_size": (7, 0),
        "window_attn_skip_freq": 2,
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": 32.0,
        "yarn_correction_range_round_to_int": False,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_arguments_describe_the_model(family: str) -> None:
    model = TINY[family]
    args = vars(model_args(model))
    assert {name: args[name] for name in WANTED[family]} == WANTED[family]
    assert (args["num_layers"], args["hidden_size"]) == (model.num_layers, model.hidden_size)
    assert (args["num_attention_heads"], args["ffn_hidden_size"]) == (model.num_heads, model.ffn_hidden_size)
    assert args["padded_vocab_size"] == model.padded_vocab_size and args["normalization"] == "RMSNorm"
    assert (args["norm_epsilon"], args["rotary_base"]) == (model.norm_eps, model.rope.theta)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_arguments_are_plain_values(family: str) -> None:
    for name, value in vars(model_args(TINY[family])).items():
        parts = value if isinstance(value, list | tuple) else [value]
        assert all(part is None or type(part) in (bool, int, float, str) for part in parts), name


def test_the_arguments_have_experts_dense_layers_and_mtp() -> None:
    model = TINY["deepseek_v3"]
    args = model_args(model.model_copy(update={"mtp_layers": 1}))
    assert args.moe_layer_freq == [0, *[1] * (model.num_layers - 1)] and args.mtp_num_layers == 1
    assert args.moe_shared_expert_intermediate_size == model.moe.shared_width
    assert args.q_lora_rank == model.mla.q_lora_rank and args.kv_lora_rank == model.mla.kv_lora_rank
