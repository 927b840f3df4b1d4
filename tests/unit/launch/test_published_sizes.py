"""The sizes in the recipes of real models are those of the config.json that these were published with.

They stand there, though model.path would give them: pretraining has no folder to read them from, and a plan or a
check before a job needs no download.
"""

from typing import Any

import pytest

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.families.same_model import model_changes
from tests.unit.families.test_hf_config import PUBLISHED_DEEPSEEK_V3, PUBLISHED_GLM_5, PUBLISHED_MINIMAX_M2
from tests.unit.launch.conftest import ROOT

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": PUBLISHED_DEEPSEEK_V3,
    "glm_5": PUBLISHED_GLM_5,
    "llama3_8b": {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "minimax_m2": PUBLISHED_MINIMAX_M2,
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "moonlight_16b_a3b": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "olmoe_1b_7b": {
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "qwen3_235b_a22b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    },
    "qwen3_30b_a3b": QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
    },
    "qwen3_next_80b_a3b": QWEN3
    | {
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_of_a_recipe_has_the_published_sizes(name):
    ours = load_config(PretrainConfig, ROOT / f"launch/recipes/{name}/model.toml").model
    theirs = checked_model_from_hf({"hidden_act": "silu"} | PUBLISHED[name])
    assert model_changes(theirs.model_dump(mode="json"), ours) == []
    assert (ours.max_position, ours.mtp_layers) == (theirs.max_position, theirs.mtp_layers)


def test_every_recipe_of_a_real_model_is_held_to_a_published_config():
    folders = {path.name for path in (ROOT / "launch/recipes").iterdir()}
    # The first is the architecture of Moonlight for pretraining; the others are of no published model.
    assert folders - PUBLISHED.keys() == {"deepseek_v3_small", "tiny_moe", "any_model"}
