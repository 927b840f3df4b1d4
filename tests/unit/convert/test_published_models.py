"""Published models scaled down, two of each newer family: transformers' numbers, every bit, the plan's weights."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.families import family_named, weight_map
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in
from mcore_rl.planning.weights import weights_by_stage
from tests.conversion import assert_same, differing, exported, imported, read_dist, read_hf, write_hf
from tests.double import TORCH, doubled, in_double
from tests.hf_models import Oracle, Tensors, as_saved, oracle_of, random_tokens
from tests.hf_weights import to_global
from tests.parallel.parity import largest, relative_errors
from tests.unit.families.test_hf_config import (
    PUBLISHED_DEEPSEEK_V3,
    PUBLISHED_GLM_5,
    PUBLISHED_GLM_FLASH,
    PUBLISHED_MINIMAX_M2,
)
from tests.unit.launch.test_published_sizes import PUBLISHED as OF_RECIPES
from tests.unit.model.test_gradients_equal_transformers import eager, our_gradients
from tests.unit.planning.test_memory import saved_numbers

QWEN3_5: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
DEEPSEEK_V2: dict[str, Any] = PUBLISHED_DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "n_shared_experts": 2, "norm_topk_prob": False, "scoring_func": "softmax",
    "vocab_size": 102400, "first_k_dense_replace": 1, "num_experts_per_tok": 6, "num_nextn_predict_layers": 0,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "attention_dropout": 0.0, "hidden_act": "silu", "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": OF_RECIPES["qwen3_next_80b_a3b"],
    "Qwen3.5-35B-A3B": QWEN3_5 | {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "linear_num_value_heads": 32,
        "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512,
    },
    "Qwen3.5-397B-A17B": QWEN3_5 | {
        "model_type": "qwen3_5_moe_text", "hidden_size": 4096, "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024, "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
        "num_hidden_layers": 60, "num_key_value_heads": 2, "shared_expert_intermediate_size": 1024,
    },
    "Qwen3.5-0.8B": QWEN3_5 | {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "linear_num_value_heads": 16,
        "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen3.5-27B": QWEN3_5 | {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
    },
    "MiniMax-M2": PUBLISHED_MINIMAX_M2,
    "DeepSeek-V3.2": PUBLISHED_DEEPSEEK_V3 | {
        "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    },
    "GLM-5": PUBLISHED_GLM_5,
    "GLM-5.2": PUBLISHED_GLM_5 | {
        "head_dim": 192, "index_skip_topk_offset": 3, "index_topk_freq": 4, "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    },
    "GLM-4.7-Flash": PUBLISHED_GLM_FLASH,
    "DeepSeek-V2": DEEPSEEK_V2 | {
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "num_hidden_layers": 60, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
    },
    "DeepSeek-V2-Lite": DEEPSEEK_V2 | {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
        "rope_scaling": PUBLISHED_DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "dots.llm1": {
        "model_type": "dots1", "attention_bias": False, "attention_dropout": 0.0, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768,
        "max_window_layers": 62, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc",
        "sliding_window": None, "tie_word_embeddings": False, "topk_method": "noaux_tc", "vocab_size": 152064,
    },
    "Solar-Open-100B": {
        "model_type": "solar_open", "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 10240, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "vocab_size": 196608,
    },
    "Seed-OSS-36B": {
        "model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648,
        "max_position_embeddings": 524288, "mlp_bias": False, "num_attention_heads": 80, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
        "vocab_size": 155136,
    },
    "Mistral-7B-v0.3": MISTRAL | {
        "hidden_size": 4096, "max_position_embeddings": 32768, "num_hidden_layers": 32, "vocab_size": 32768,
    },
    "Mistral-Nemo-12B": MISTRAL | {
        "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 128000, "num_hidden_layers": 40,
        "vocab_size": 131072,
    },
}  # fmt: skip
"""Each config.json, without what no program here reads."""
SINGLE = (
    *("Qwen3-Next-80B-A3B", "MiniMax-M2", "DeepSeek-V3.2", "GLM-4.7-Flash", "dots.llm1", "Solar-Open-100B"),
    "Seed-OSS-36B",
)
"""Models of which a family has no other size: they are scaled twice."""
CASES = {name: (name, 32, 8 if name == "GLM-5.2" else 5) for name in PUBLISHED}
CASES |= {f"{name}-again": (name, 64, 6) for name in SINGLE}
"""Name: the model, by what its widths are divided, and how many of its layers there are."""
OF_HEADS = (
    *("head_dim", "rotary_dim", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
WIDTHS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("q_lora_rank", "kv_lora_rank"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def scaled(config: dict[str, Any], divisor: int, num_layers: int) -> dict[str, Any]:
    """The config.json of a model with fewer layers, experts and heads, and narrower ones; its ratio of query heads to
    key/value heads, and all that is no size, are as published.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    fewer = min(groups, 4 if heads == groups else 2)
    small = {"num_attention_heads": heads // groups * fewer, "num_key_value_heads": fewer, "vocab_size": 1003}
    small |= {key: config[key] // 8 for key in OF_HEADS if key in config}
    small |= {key: config[key] // divisor for key in WIDTHS if config.get(key)}
    small |= {key: min(config[key], 32) for key in EXPERTS if key in config}
    if "attn_type_list" in config:
        small["attn_type_list"] = config["attn_type_list"][:num_layers]
    if "linear_num_key_heads" in config:
        values = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        small |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4 * values}
    if "index_topk" in config:
        small |= {"index_topk": 32, "index_n_heads": 16}  # with few heads many scores are exactly zero
    return config | small | {"num_hidden_layers": num_layers}


@cache
def theirs(case: str) -> tuple[dict[str, Any], Oracle]:
    """A config.json and transformers' model of it."""
    name, divisor, num_layers = CASES[case]
    config = scaled(PUBLISHED[name], divisor, num_layers)
    # The embedding of a token that pads would have no gradient.
    made = transformers.AutoConfig.for_model(**config, pad_token_id=None)
    return config, oracle_of(made, family_named(config["model_type"]).hf_class)


def as_gradients(model: Any) -> Tensors:
    """The gradients by the names of saved tensors."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    return as_saved(model)[1]


@pytest.mark.matrix("Qwen3.5-27B")
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str, one_rank: Mesh) -> None:
    """In fp64, logits at 1,500 positions; YaRN's frequencies, which are rounded to fp32 in two ways, leave 2e-6."""
    config, oracle = theirs(case)
    # transformers' class leaves MTP layers out.
    model = checked_model_from_hf(config).model_copy(update={"mtp_layers": 0})
    with in_double():
        wanted = eager(oracle.model)
        # Seed-OSS has dropout in training.
        chunk = doubled(build_model(model, one_rank, start(TORCH), TORCH)[0]).eval()
        copy_in([chunk], to_global(oracle.tensors, model))

        def ours(tokens_BS: Tensor) -> Tensor:
            at_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
            logits_BSV: Tensor = chunk(input_ids=tokens_BS, position_ids=at_BS, attention_mask=None)
            return logits_BSV[..., : model.vocab_size]

        with torch.no_grad():
            tokens_BS = random_tokens(rows=1, length=1500)
            distance = (ours(tokens_BS) - wanted(tokens_BS).logits).abs().max().item()
            assert distance <= 1e-5
        tokens_BS = random_tokens(length=100)
        labels_B = tokens_BS.roll(-1, 1).flatten()
        for logits_BSV in (ours(tokens_BS), wanted(tokens_BS).logits):
            cross_entropy(logits_BSV.flatten(0, 1), labels_B, reduction="sum").backward()
    found = {key: g for key, g in our_gradients(chunk).items() if not key.endswith("expert_bias")}
    gradients = to_global(as_gradients(wanted), model)
    errors = relative_errors(found, {key: gradients[key] for key in found})
    assert max(errors.values()) <= 1e-6, largest(errors)


@pytest.mark.matrix("Qwen3.5-0.8B", "GLM-5.2")
@pytest.mark.parametrize("case", CASES)
def test_import_and_export_give_back_every_bit_of_as_many_weights_as_are_planned(case: str, tmp_path: Path) -> None:
    """With the tensors of MTP layers, which transformers does not save."""
    config, oracle = theirs(case)
    model = checked_model_from_hf(config).model_copy(update={"vocab_multiple": 16})
    is_fused = any(name.endswith(".experts.gate_up_proj") for name in oracle.tensors)
    weights = weight_map(model, "fused" if is_fused else "each")
    every = {name: torch.randn(shape) for name, shape in weights.hf_shapes.items()} | oracle.tensors
    every |= {copy.name: every[copy.original] for copy in weights.copies if copy.written}
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in every.items()
    }
    assert (len(tensors) > len(oracle.tensors)) == bool(model.mtp_layers)
    source = write_hf(tmp_path / "hf", config | {"torch_dtype": "bfloat16"}, tensors, shards=3)
    checkpoint = imported(source, tmp_path / "ckpt")
    again = exported(checkpoint, tmp_path / "again", reference=source)
    assert_same(read_hf(again), read_hf(source))
    assert differing(source, checkpoint) == []
    assert (again / "config.json").read_bytes() == (source / "config.json").read_bytes()
    (planned,) = weights_by_stage(model, MeshConfig())
    assert saved_numbers(planned) == sum(tensor.numel() for tensor in read_dist(checkpoint).values())
