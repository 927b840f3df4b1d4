"""The formula against a count of every matrix product that transformers' models make."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mcore_rl.config.model import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.metrics.metrics import reduced
from mcore_rl.metrics.performance import speed_metrics
from mcore_rl.planning.flops import forward_flops_per_token, train_flops_per_token
from mcore_rl.planning.weights import active_adapters

ROWS, LENGTH = 2, 24
SIZES = {
    "num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "ffn_hidden_size": 72,
    "vocab_size": 100,
}  # fmt: skip
COMMON = {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 72, "vocab_size": 100, "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}


def deepseek(q_lora_rank):
    ours = ModelConfig(
        **SIZES,
        family="deepseek_v3",
        moe=MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=20, shared_experts=2, first_dense_layers=1),
        mla=MLAConfig(**LATENT, q_lora_rank=q_lora_rank),
    )
    theirs = (
        COMMON
        | LATENT
        | {
            "num_key_value_heads": 4, "head_dim": 6, "q_lora_rank": q_lora_rank, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "n_group": 2, "topk_group": 1,
        }
    )  # fmt: skip
    return ours, DeepseekV3ForCausalLM(DeepseekV3Config(**theirs))


def moe():
    return ModelConfig(**SIZES, family="qwen3_moe", moe=MoEConfig(num_experts=6, top_k=2, ffn_hidden_size=24))


CASES = {
    "llama": lambda: (ModelConfig(**SIZES, family="llama"), LlamaForCausalLM(LlamaConfig(**COMMON))),
    "qwen3_moe": lambda: (
        moe(),
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)),
    ),
    "qwen2_moe": lambda: (
        ModelConfig(
            **(SIZES | {"head_dim": 8}),
            family="qwen2_moe",
            moe=MoEConfig(num_experts=6, top_k=2, ffn_hidden_size=24, shared_experts=1, shared_ffn_hidden_size=40),
        ),
        Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **(COMMON | {"head_dim": 8}),
                num_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                shared_expert_intermediate_size=40,
            )
        ),
    ),
    "deepseek_v3": lambda: deepseek(q_lora_rank=18),
    "deepseek_v3 without a query rank": lambda: deepseek(q_lora_rank=None),
}


def counted(model, *, backward):
    """FLOPs of a pass per token, without the rotary angles (a product there; a table, not the model)."""
    tokens_BS = torch.randint(0, 100, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        logits_BSV = model(input_ids=tokens_BS).logits
        if backward:
            logits_BSV.sum().backward()
    by_module = counter.get_flop_counts()
    rotary = sum(sum(n.values()) for name, n in by_module.items() if name.endswith("model.rotary_emb"))
    return (counter.get_total_flops() - rotary) / tokens_BS.numel()


@pytest.mark.matrix("llama")
@pytest.mark.parametrize("case", CASES)
def test_the_formula_is_what_a_model_computes(case):
    ours, model = CASES[case]()
    parts = forward_flops_per_token(ours, LENGTH)
    # Eager attention computes the full S x S scores, of which the formula counts half.
    full_scores = parts["attention_scores"]
    assert counted(model, backward=False) == sum(parts.values()) + full_scores
    assert counted(model, backward=True) == train_flops_per_token(ours, LENGTH) + 3 * full_scores


@pytest.mark.full
def test_the_formula_is_what_a_model_with_adapters_computes(peft):
    ours, model = CASES["llama"]()
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=5, target_modules=modules))
    # Without it the first layer has no gradient of its inputs.
    adapted.enable_input_require_grads()
    full_scores = forward_flops_per_token(ours, LENGTH)["attention_scores"]
    expected = train_flops_per_token(ours, LENGTH, LoraConfig(rank=5)) + 3 * full_scores
    assert counted(adapted, backward=True) == expected


def test_a_token_passes_the_adapters_of_its_experts():
    ours, lora = moe(), LoraConfig(rank=6, targets=("experts",))
    # Rank 3 in each of two experts: one A for gate and up, their B, and A and B of the way down.
    assert active_adapters(lora, ours) == 3 * 2 * 3 * (32 + 2 * 24 + 24 + 32)


def test_an_mtp_layer_is_a_projection_a_layer_and_the_output_again():
    plain, _ = deepseek(q_lora_rank=18)
    one_more_layer = plain.model_copy(update={"num_layers": plain.num_layers + 1})
    with_mtp = plain.model_copy(update={"mtp_layers": 1})
    added = train_flops_per_token(with_mtp, LENGTH) - train_flops_per_token(one_more_layer, LENGTH)
    assert added == 6 * (2 * 32 * 32 + 32 * 100)


@pytest.mark.parametrize(("length", "window"), [(4096, 128), (4096, 4000), (64, 128)])
def test_every_second_layer_sees_its_window(length, window):
    model = ModelConfig(**SIZES, family="gpt_oss", moe=MoEConfig(num_experts=6, ffn_hidden_size=72))
    whole = forward_flops_per_token(model, length)["attention_scores"]
    windowed = forward_flops_per_token(model.model_copy(update={"sliding_window": window}), length)
    seen = sum(min(position + 0.5, window) for position in range(length)) / length
    assert windowed["attention_scores"] / whole == pytest.approx((1 + 2 * seen / (length / 2)) / 3, rel=1e-4)


def test_padding_of_the_vocabulary_is_not_the_model():
    model = ModelConfig(vocab_size=100)
    assert train_flops_per_token(model, 8) == train_flops_per_token(model.model_copy(update={"vocab_multiple": 1}), 8)


def test_speed_of_one_rank_is_the_mean_over_steps():
    metrics = speed_metrics(1000, 2.0, num_ranks=4, flops_per_token=1e9, peak_flops=1e12)
    metrics += speed_metrics(3000, 2.0, num_ranks=4, flops_per_token=1e9, peak_flops=1e12)
    assert reduced(metrics) == {
        "train/step_s": 2,
        "train/tokens_per_s_per_rank": 250,  # 4000 tokens / (4 s * 4 ranks)
        "train/model_tflops_per_rank": 0.25,
        "train/mfu": 0.25,
    }


def test_without_a_peak_there_is_no_mfu():
    found = {one.name for one in speed_metrics(1000, 2.0, num_ranks=4, flops_per_token=1e9, peak_flops=None)}
    assert found == {"train/step_s", "train/tokens_per_s_per_rank", "train/model_tflops_per_rank"}


def test_queries_attend_to_chosen_keys_and_an_indexer_has_no_backward_pass():
    """By hand for 24 tokens of which 8 keys are chosen: 8 queries see 4 keys in the mean, the others 8."""
    plain, _ = deepseek(24)
    shape = IndexerConfig(top_k=8, heads=5, width=7, shared_layers=(1,))
    model = plain.model_copy(update={"family": "glm_moe_dsa", "indexer": shape})
    seen = (8 * 4 + 16 * 8) / 24
    before, found = (forward_flops_per_token(one, 24) for one in (plain, model))
    assert found["attention_scores"] == pytest.approx(before["attention_scores"] * seen / 12)
    # Two layers have one: queries of the latent, a key and its weights of the hidden state, half of the scores.
    indexer = 2 * 2 * (24 * 5 * 7 + 32 * (7 + 5) + 12 * 5 * 7)
    assert found["indexer"] == indexer
    assert train_flops_per_token(model, 24) == pytest.approx(3 * sum(found.values()) - 2 * indexer)
    assert forward_flops_per_token(model, 8) == forward_flops_per_token(plain, 8)
