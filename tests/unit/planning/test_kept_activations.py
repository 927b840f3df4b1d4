"""The closed form of our layers' activations against the tensors that a real forward pass keeps."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.model import DeltaConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.families import FAMILIES, family_named, family_of
from tests import fake_world
from tests.fake_world import saved_by_layer
from tests.ranks import run_ranks

MLA = {"kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
NORMED, SPLIT = "layernorm", "mla_up_proj"
SELECTED = (
    ("core_attn",), (NORMED,), ("moe_act",), ("moe",), ("shared_experts",), (SPLIT,), ("mlp",), ("moe_act", NORMED),
    ("moe", NORMED), (SPLIT, "moe", NORMED),
)  # fmt: skip
"""Values of platform.recompute_modules."""
RANKS = (1, 2, 4, 8)
"""Tensor-parallel ranks. On 8 the families of grouped queries have fewer key/value heads than ranks."""


def model_of(family, num_layers, num_heads=8):
    is_latent = family_named(family).is_latent
    model = ModelConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=64,
        num_heads=num_heads,
        num_kv_heads=num_heads if is_latent else 4,
        head_dim=24,
        ffn_hidden_size=160,
        vocab_size=256,
        mla=MLAConfig(**MLA, q_lora_rank=None if family == "deepseek_v2" else 32) if is_latent else MLAConfig(),
    )  # fmt: skip
    if family_of(model).router == "none":
        return model
    shared = 1 if "moe.shared_experts" in family_of(model).settings else 0
    moe = MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=40, shared_experts=shared, balance="none")
    return model.model_copy(update={"moe": moe})


UNSEEN = {"moe_router_pre_softmax": None, "rotary_base": None, "moe_layer_freq": None}
"""Arguments that change nothing of what a layer keeps."""


def first_of_each_kind():
    """The families, without those whose layers are built by the same arguments as an earlier one's."""
    found = {}
    for name in ("deepseek_v3", "glm4_moe", *FAMILIES):
        family, model = family_named(name), model_of(name, 2)
        arguments = family.architecture(model) | UNSEEN
        found.setdefault(str((sorted(arguments.items(), key=str), family.has_full_qk_norm)), name)
    return sorted(found.values())


KINDS = first_of_each_kind()
CASES = [(family, "bf16", tp) for family in KINDS for tp in RANKS]
# On more ranks CPUs replace Megatron's linear layers in fp32, and keep what they gather.
CASES += [(family, "fp32", 1) for family in KINDS]


def counted(family, precision, tp, recompute, modules=("core_attn",)):
    settings = PlatformConfig(precision=precision, recompute=recompute, recompute_modules=modules)
    # Two heads a rank: one alone is a view of the product where several are copies.
    return saved_by_layer(model_of(family, 2, max(8, 2 * tp)), settings, tp)


def is_run(model, tp, modules):
    """Whether the checks accept it, and something of these layers is computed again by each of the modules."""
    family = family_of(model)
    absent = {"mlp"} if model.is_moe else {"moe", "moe_act"}
    absent |= set() if model.is_moe and model.moe.shared_experts else {"shared_experts"}
    absent |= set() if family.is_latent else {SPLIT}
    return not absent & set(modules) and (tp <= model.num_kv_heads or not family.has_full_qk_norm)


def counted_by_recomputation(family, precision, tp):
    kinds = [("none", ("core_attn",)), ("full", ("core_attn",)), *(("selective", names) for names in SELECTED)]
    return {
        (recompute, *modules): counted(family, precision, tp, recompute, modules)
        for recompute, modules in kinds
        if is_run(model_of(family, 2), tp, modules)
    }


@pytest.mark.matrix("glm4_moe-bf16-2")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_layer_of_ours_keeps_the_bytes_that_a_forward_pass_keeps(case):
    """Offsets of experts and tables of angles are left out: small beside widths that are not of a test."""
    (found,) = run_ranks(counted_by_recomputation, 1, *case)
    assert len(found) >= 5 or case in [("olmoe", "bf16", 8), ("minimax_m2", "bf16", 8)]
    planned = {kind: layer.planned for kind, layer in found.items()}
    assert planned == {kind: pytest.approx(layer.counted, rel=0.02) for kind, layer in found.items()}


def adapters_counted(lora, positions):
    fake_world.POSITIONS = positions
    path = Path(__file__).parents[3] / "launch/recipes/qwen3_30b_a3b/grpo_lora.toml"
    config = load_config(RlRunConfig, path, ["platform.recompute=none"])
    return fake_world.saved_by_layers(config.mesh, config.model, config.platform, lora)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("lora", "least", "most"),
    [
        (LoraConfig(rank=16), 1.0, 1.02),
        (LoraConfig(rank=64, expert_rank=64, expert_gate_up="split"), 1.0, 1.05),
        (LoraConfig(rank=16, targets=("attention",)), 0.7, 0.75),
    ],
    ids=["rank 16", "rank 64 of experts too", "attention"],
)
def test_a_layer_with_adapters_keeps_what_full_training_does(lora, least, most):
    """The outputs of A are narrow. Frozen experts need no inputs of their products, which the plan has all the same."""
    (layer,) = run_ranks(adapters_counted, 1, lora, 1024)
    assert least * layer.planned < layer.counted < most * layer.planned


def delta_nets_counted(precision, tp, cases):
    model = model_of("qwen3_next", 2)
    # Every third layer of two is none.
    model = model.model_copy(
        update={"delta": DeltaConfig(full_every=3, key_heads=8, value_heads=16, key_dim=24, value_dim=32)}
    )
    found = {}
    for recompute, modules in cases:
        settings = PlatformConfig(precision=precision, recompute=recompute, recompute_modules=modules)
        found[recompute, *modules] = saved_by_layer(model, settings, tp)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("precision", "tp"), [("bf16", 1), ("bf16", 4), ("fp32", 1)])
def test_a_gated_delta_net_keeps_its_projections_and_its_output(precision, tp):
    """Every backward pass computes again all that lies between them."""
    cases = [("none", ("core_attn",)), ("full", ("core_attn",)), ("selective", ("moe", NORMED))]
    (found,) = run_ranks(delta_nets_counted, 1, precision, tp, cases)
    planned = {kind: layer.planned for kind, layer in found.items()}
    assert planned == {kind: pytest.approx(layer.counted, rel=0.02) for kind, layer in found.items()}


def indexers_counted(precision, tp, kinds, cases):
    model = model_of("glm_moe_dsa", 2)
    found = {}
    for kind in kinds:
        shared = (1,) if kind == "shared" else ()
        indexer = IndexerConfig(top_k=16, heads=4, width=16, shared_layers=shared)
        for recompute, modules in cases:
            settings = PlatformConfig(precision=precision, recompute=recompute, recompute_modules=modules)
            layers = model.model_copy(update={"indexer": indexer})
            found[kind, recompute, *modules] = saved_by_layer(layers, settings, tp)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("precision", "tp"), [("bf16", 1), ("bf16", 2), ("fp32", 1)])
def test_attention_over_chosen_keys_keeps_less_than_its_plan_has(precision, tp):
    """Its blocks are computed again, so that they keep no statistics; the plan does not know how long samples are."""
    cases = [("none", ("core_attn",)), ("selective", ("moe", NORMED))]
    (found,) = run_ranks(indexers_counted, 1, precision, tp, ("indexed", "shared"), cases)
    for kind, layer in found.items():
        assert layer.counted <= layer.planned <= 1.3 * layer.counted, kind
    choice = 16 * 4 * 64 * tp
    for case in cases:
        indexed, shared = (found[kind, case[0], *case[1]] for kind in ("indexed", "shared"))
        assert indexed.counted - shared.counted == indexed.planned - shared.planned == choice


def counted_with_products(*case):
    """The same, with every matrix product computed."""
    fake_world._WithoutProducts = nullcontext
    return counted(*case)


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_products_that_are_left_out_change_no_count(family):
    case = (family, "bf16", 1, "none")
    assert run_ranks(counted_with_products, 1, *case) == run_ranks(counted, 1, *case)
