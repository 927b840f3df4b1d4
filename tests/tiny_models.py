"""Each family at a size for tests: 4 layers, 8 experts or fewer, 120 tokens."""

from typing import Any

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import DeltaConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig

DELTA = DeltaConfig(full_every=2, key_heads=4, value_heads=8, key_dim=8, value_dim=12)
MLA = MLAConfig(q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
GROUPED = {
    "shared_experts": 1, "num_groups": 4, "top_groups": 2, "routed_scaling": 2.5, "balance": "seq_aux_loss",
    "expert_bias": True,
}  # fmt: skip
"""Routers of DeepSeek's kind."""


def moe(**changes: Any) -> MoEConfig:
    return MoEConfig(**{"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32} | changes)


def tiny(family: str, **changes: Any) -> ModelConfig:
    alike = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    alike |= {"ffn_hidden_size": 128, "vocab_size": 120, "vocab_multiple": 16}
    return ModelConfig(**{"family": family} | alike | changes)


MODELS = (
    tiny("qwen3_moe", moe=moe(aux_loss_coeff=0.01, z_loss_coeff=0.001)),
    tiny(
        "mixtral",
        ffn_hidden_size=64,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6),
        moe=moe(num_experts=4, ffn_hidden_size=64),
    ),
    tiny("deepseek_v3", num_kv_heads=4, mla=MLA, moe=moe(top_k=4, first_dense_layers=1, **GROUPED)),
    tiny("llama", tied_embeddings=False),
    tiny("qwen3", tied_embeddings=True),
    tiny("qwen2", tied_embeddings=True),
    tiny("qwen2_moe", moe=moe(shared_experts=1, shared_ffn_hidden_size=96, normalize_top_k=False)),
    tiny(
        "glm4_moe",
        qk_norm="on",
        rope=RopeConfig(fraction=0.5),
        moe=moe(shared_experts=1, first_dense_layers=1, routed_scaling=2.5, balance="seq_aux_loss", expert_bias=True),
    ),
    tiny("olmoe", ffn_hidden_size=32, norm_eps=1e-5, moe=moe(normalize_top_k=False, aux_loss_coeff=0.01)),
    tiny(
        "deepseek_v2",
        num_kv_heads=4,
        mla=MLA,
        moe=moe(
            top_k=3, shared_experts=2, first_dense_layers=1, num_groups=4, top_groups=2, normalize_top_k=False,
            routed_scaling=4.0, balance="seq_aux_loss",
        ),
    ),
    tiny(
        "gpt_oss",
        ffn_hidden_size=48,
        norm_eps=1e-5,
        sliding_window=8,
        rope=RopeConfig(theta=150_000.0, scaling="yarn", factor=32.0, original_length=16, truncate=False),
        moe=moe(ffn_hidden_size=48),
    ),
    tiny("glm4_moe_lite", num_kv_heads=4, mla=MLA, moe=moe(top_k=4, first_dense_layers=1, **GROUPED)),
    tiny(
        "deepseek_v32",
        num_kv_heads=4,
        mla=MLA,
        indexer=IndexerConfig(top_k=8, heads=4, width=16),
        moe=moe(top_k=4, first_dense_layers=1, **GROUPED),
    ),
    tiny(
        "glm_moe_dsa",
        num_kv_heads=4,
        mla=MLA,
        indexer=IndexerConfig(top_k=8, heads=4, width=16, shared_layers=(1, 3)),
        moe=moe(top_k=4, first_dense_layers=1, **GROUPED),
    ),
    tiny("dots1", moe=moe(top_k=4, first_dense_layers=1, **GROUPED)),
    tiny("solar_open", ffn_hidden_size=32, moe=moe(top_k=4, **GROUPED)),
    tiny(
        "minimax_m2",
        ffn_hidden_size=32,
        rope=RopeConfig(theta=1e6, fraction=0.5),
        moe=moe(balance="seq_aux_loss", expert_bias=True),
    ),
    tiny("seed_oss"),
    tiny(
        "qwen3_next", rope=RopeConfig(fraction=0.25), delta=DELTA, moe=moe(shared_experts=1, shared_ffn_hidden_size=96)
    ),
    tiny(
        "qwen3_5_moe_text",
        ffn_hidden_size=32,
        rope=RopeConfig(fraction=0.25),
        delta=DELTA,
        moe=moe(shared_experts=1, shared_ffn_hidden_size=96),
    ),
    tiny("qwen3_5_text", tied_embeddings=True, rope=RopeConfig(fraction=0.25), delta=DELTA),
    tiny("mistral", norm_eps=1e-5),
)  # fmt: skip
TINY = {model.family: model for model in MODELS}
"""The models by the family that they belong to."""


def shallow(model: ModelConfig, *meshes: MeshConfig) -> ModelConfig:
    """The model with two layers where none of the meshes has stages, which need more. Of a model whose first layer is
    dense the other one has experts.
    """
    return model if any(mesh.pp > 1 for mesh in meshes) else model.model_copy(update={"num_layers": 2})


def without_router_losses(model: ModelConfig, **moe: Any) -> ModelConfig:
    """The model without the routers' losses, which are of a microbatch, padding included, and not of tokens."""
    losses = {"balance": "none", "aux_loss_coeff": 0.0, "z_loss_coeff": 0.0}
    return model.model_copy(update={"moe": model.moe.model_copy(update=losses | moe)})
