"""Tiny random models of transformers in fp32: the oracle of logits, and their weights as checkpoints name them."""

import copy
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig

VOCAB, TOLERANCE = 99, 2e-5
Tensors = dict[str, Tensor]
PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_models.json").read_text())
"""By the name of a published model, its config.json without what no program here reads."""

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 256,
}  # fmt: skip
GROUPED = SHAPE | {"head_dim": 24}
EXPERTS = GROUPED | {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
DEEPSEEK = SHAPE | {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_mtp_layers": 0,
    "rms_norm_eps": 1e-5,  # the norms of the latents have 1e-6 nevertheless
}
QWEN2_MOE = EXPERTS | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False}
DEEPSEEK_V2 = {key: value for key, value in DEEPSEEK.items() if key != "num_mtp_layers"} | {
    "num_experts_per_tok": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 2.0,
}
OLMOE = SHAPE | {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
GPT_OSS = GROUPED | {
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
GLM4 = GROUPED | {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "attention_bias": True,
    "use_qk_norm": True, "num_mtp_layers": 0,
}  # fmt: skip
GLM4_LITE = {
    key: value for key, value in DEEPSEEK.items() if key not in ("first_k_dense_replace", "num_mtp_layers")
} | {"routed_scaling_factor": 1.8}
DSA = {key: value for key, value in DEEPSEEK.items() if key != "num_mtp_layers"} | {
    # With few heads many scores are exactly zero, of which transformers takes any.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "max_position_embeddings": 2048,
}
DOTS1 = {
    key: value for key, value in GLM4.items() if key not in ("attention_bias", "use_qk_norm", "num_mtp_layers")
} | {"norm_topk_prob": True, "sliding_window": None}
SOLAR = {
    key: value
    for key, value in GLM4.items()
    if key not in ("intermediate_size", "first_k_dense_replace", "use_qk_norm", "num_mtp_layers")
} | {"attention_bias": False}
MINIMAX_M2 = GROUPED | {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 12}
QWEN3_NEXT = GROUPED | {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "max_position_embeddings": 2048,
}  # fmt: skip
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
QWEN3_5 = {key: value for key, value in QWEN3_NEXT.items() if key not in OF_EXPERTS}
QWEN3_5_MOE = {key: value for key, value in QWEN3_NEXT.items() if key != "intermediate_size"}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama-llama3": ("Llama", GROUPED | {"head_dim": 32, "max_position_embeddings": 131072, "rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3", GROUPED | {"tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", GROUPED | {"rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe-raw-gates": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3-full-queries": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3-yarn": ("DeepseekV3", DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2_moe-no-biases": ("Qwen2Moe", QWEN2_MOE | {"qkv_bias": False, "mlp_only_layers": [0]}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "olmoe": ("Olmoe", OLMOE | {"norm_topk_prob": False}),
    "olmoe-normalized": ("Olmoe", OLMOE | {"norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek_v2-three-groups": (
        "DeepseekV2",
        # 6 experts of 3 groups, as DeepSeek-V2-236B: Megatron would rank a group by its best 2.
        DEEPSEEK_V2 | {"n_routed_experts": 16, "num_experts_per_tok": 6, "topk_group": 3},
    ),
    "deepseek_v3-three-a-group": ("DeepseekV3", DEEPSEEK | {"n_routed_experts": 16, "num_experts_per_tok": 6}),
    "deepseek_v2-lite": (
        "DeepseekV2",
        DEEPSEEK_V2
        | {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "glm4_moe": ("Glm4Moe", GLM4),
    "glm4_moe-plain": (
        "Glm4Moe",
        GLM4 | {"attention_bias": False, "use_qk_norm": False, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe-yarn": ("Glm4Moe", GLM4 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "glm4_moe_lite": ("Glm4MoeLite", GLM4_LITE),
    "deepseek_v32": ("DeepseekV32", DSA),
    "deepseek_v32-yarn": ("DeepseekV32", DSA | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
    "glm_moe_dsa": ("GlmMoeDsa", DSA),
    "glm_moe_dsa-shared": (
        "GlmMoeDsa",
        DSA | {"num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
    "dots1": ("Dots1", DOTS1),
    "solar_open": ("SolarOpen", SOLAR),
    "solar_open-yarn": ("SolarOpen", SOLAR | {"attention_bias": True, "rope_parameters": YARN}),
    "minimax_m2": ("MiniMaxM2", MINIMAX_M2),
    "minimax_m2-yarn": ("MiniMaxM2", MINIMAX_M2 | {"rope_parameters": YARN}),
    "qwen3_next": ("Qwen3Next", QWEN3_NEXT),
    "qwen3_next-first-dense": (
        "Qwen3Next",
        QWEN3_NEXT | {"mlp_only_layers": [0], "full_attention_interval": 2, "norm_topk_prob": False},
    ),
    "qwen3_next-yarn": ("Qwen3Next", QWEN3_NEXT | {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", QWEN3_5_MOE),
    "qwen3_5_moe_text-yarn": (
        "Qwen3_5Moe",
        QWEN3_5_MOE | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5, "truncate": False}},
    ),
    "qwen3_5_text": ("Qwen3_5", QWEN3_5 | {"tie_word_embeddings": True}),
    "seed_oss": ("SeedOss", GROUPED),
    "mistral": ("Mistral", GROUPED | {"sliding_window": None}),
}
"""Name: the class's prefix in transformers, and its config."""


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """A model of transformers, and what it would save."""

    model: nn.Module
    config: dict[str, Any]
    """Its config.json."""
    tensors: Tensors
    """Its safetensors."""

    @property
    def ours(self) -> ModelConfig:
        """Our config of the same model."""
        return checked_model_from_hf(self.config).model_copy(update={"vocab_multiple": 16})

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """`[B, S, V]`."""
        with torch.no_grad():
            return self.model(tokens_BS).logits  # type: ignore[no-any-return]


@cache
def oracle(case: str, **changes: Any) -> Oracle:
    """The model of `CASES[case]` with random weights large enough that every part of it is seen in the logits."""
    prefix, settings = CASES[case]
    kind = "TextConfig" if prefix in ("Qwen3_5", "Qwen3_5Moe") else "Config"
    # Copied: a config of transformers adds what it derives to the entries that it is given.
    config = getattr(transformers, prefix + kind)(**copy.deepcopy(settings | changes))
    return oracle_of(config, f"{prefix}ForCausalLM")


def oracle_of(config: Any, model_class: str) -> Oracle:
    """The model of a config of transformers, with such weights."""
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).eval()
    randomize(model)
    saved, tensors = as_saved(model)
    return Oracle(model=model, config=saved, tensors=tensors)


def as_saved(model: Any) -> tuple[dict[str, Any], Tensors]:
    """The config.json and the tensors that transformers saves, by their names there."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
    return config, {name: t.clone() for name, t in tensors.items()}


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Weights that keep the size of what passes them, norms around one, biases of the choice of experts around zero."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            # Zero-centered norms add one to their weights, but for those inside of gated delta nets.
            is_centered = type(model).__name__.startswith(("Qwen3Next", "Qwen3_5"))
            tensor.copy_((0 if is_centered and "linear_attn" not in name else 1) + 0.3 * noise)
        elif name.endswith("A_log"):
            tensor.copy_((2 * noise.abs()).log())
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(0.3 * noise)
        elif name.endswith("gate_up_proj_bias"):
            tensor.copy_(4 * noise)  # beyond the limit of gpt-oss's activations
        else:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)


def random_tokens(rows: int = 2, length: int = 32) -> Tensor:
    """`[B, S]`, always the same."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(2))
