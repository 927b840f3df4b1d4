"""The closed form of our layers' activations against the tensors that a real forward pass keeps."""

from contextlib import nullcontext

import pytest

from mcore_rl.config.model import MLAConfig, ModelConfig, MoEConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.fake_world import saved
from mcore_rl.fake_world.saved import saved_by_layer
from mcore_rl.families import FAMILIES, family_of
from tests.ranks import run_ranks

MLA = {"kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
NORMED, SPLIT = "layernorm", "mla_up_proj"
CASES = [
    *((family, "bf16", 1, "none", ()) for family in FAMILIES),
    *((family, "bf16", 2, "none", ()) for family in FAMILIES),
    ("llama", "fp32", 1, "none", ()),
    ("qwen3_moe", "fp32", 1, "none", ()),
    *(("qwen3_moe", "bf16", 2, "selective", names) for names in (("moe_act", NORMED), ("moe", NORMED), ("core_attn",))),
    ("deepseek_v2", "bf16", 1, "selective", ("core_attn",)),
    *(("deepseek_v3", "bf16", 1, "selective", names) for names in (("shared_experts",), (SPLIT,), (SPLIT, "moe"))),
    ("llama", "bf16", 2, "selective", ("mlp",)),
    ("qwen3_moe", "bf16", 2, "full", ()),
    ("deepseek_v3", "bf16", 1, "full", ()),
]  # fmt: skip


def model_of(family, num_layers):
    is_latent = family.startswith("deepseek")
    model = ModelConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=64,
        num_heads=8,
        num_kv_heads=8 if is_latent else 4,
        head_dim=24,
        ffn_hidden_size=160,
        vocab_size=256,
        mla=MLAConfig(**MLA, q_lora_rank=32 if family == "deepseek_v3" else None) if is_latent else MLAConfig(),
    )  # fmt: skip
    if family_of(model).router == "none":
        return model
    shared = 1 if "moe.shared_experts" in family_of(model).settings else 0
    moe = MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=40, shared_experts=shared, balance="none")
    return model.model_copy(update={"moe": moe})


def counted(family, precision, tp, recompute, modules):
    settings = PlatformConfig(
        precision=precision, recompute=recompute, recompute_modules=modules or ("core_attn",)
    )
    return saved_by_layer(model_of(family, 2), settings, tp)


def ident(case):
    return "-".join(map(str, (*case[:4], *case[4])))


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_a_layer_of_ours_keeps_the_bytes_that_a_forward_pass_keeps(case):
    (counts,) = run_ranks(counted, 1, *case)
    # Offsets of experts and tables of angles are left out: small beside widths that are not of a test.
    assert counts.planned == pytest.approx(counts.counted, rel=0.02)


def counted_with_products(*case):
    """The same, with every matrix product computed."""
    saved._WithoutProducts = nullcontext
    return counted(*case)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_products_that_are_left_out_change_no_count(family):
    case = (family, "bf16", 1, "none", ())
    assert run_ranks(counted_with_products, 1, *case) == run_ranks(counted, 1, *case)
