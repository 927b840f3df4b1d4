"""With the same weights Megatron's model computes what transformers' does, and nothing that is wrong passes for it."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families.family import Family
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in
from mcore_rl.model.transformer_config import transformer_config
from tests.double import TORCH, doubled, in_double
from tests.hf_models import CASES, TOLERANCE, VOCAB, Oracle, Tensors, oracle, random_tokens
from tests.hf_weights import to_global

WITH_DELTA_NETS = ("qwen3_next", "qwen3_next-first-dense", "qwen3_5_moe_text", "qwen3_5_text")
WITH_INDEXERS = ("deepseek_v32", "deepseek_v32-yarn", "glm_moe_dsa", "glm_moe_dsa-shared")
TURNED_IN_PART = ("glm4_moe-yarn", "minimax_m2-yarn", "qwen3_next-yarn", "qwen3_5_moe_text-yarn")
SEEN = 1e-3
"""A mistake changes logits at least so much: fifty times the tolerance."""


def logits_of(model: ModelConfig, weights: Tensors, tokens_BS: Tensor, mesh: Mesh) -> Tensor:
    platform = PlatformConfig()
    chunk = build_model(model, mesh, start(platform), platform)[0]
    copy_in([chunk], weights)
    return logits_of_chunk(chunk.eval(), tokens_BS)


def logits_of_chunk(chunk: nn.Module, tokens_BS: Tensor) -> Tensor:
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    with torch.no_grad():
        logits_BSV: Tensor = chunk(input_ids=tokens_BS, position_ids=positions_BS, attention_mask=None)
    return logits_BSV[..., :VOCAB]


def distance(theirs: Oracle, ours: ModelConfig, weights: Tensors, mesh: Mesh, length: int = 32) -> float:
    tokens_BS = random_tokens(length=length)
    difference = logits_of(ours, weights, tokens_BS, mesh) - theirs.logits(tokens_BS)
    return difference.abs().max().item()


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITH_DELTA_NETS + TURNED_IN_PART])
def test_logits_equal_those_of_transformers(case: str, one_rank: Mesh) -> None:
    theirs = oracle(case)
    # llama3 stretches wavelengths above 2,048 positions: short sequences do not see it.
    length = 512 if case == "llama-llama3" else 32
    assert distance(theirs, theirs.ours, to_global(theirs.tensors, theirs.ours), one_rank, length) <= TOLERANCE


def distance_in_double(theirs: Oracle, ours: ModelConfig, weights: Tensors, mesh: Mesh, length: int) -> float:
    """`distance` where gated delta nets do not amplify rounding."""
    tokens_BS = random_tokens(length=length)
    with in_double():
        for module in theirs.model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"
        chunk = doubled(build_model(ours, mesh, start(TORCH), TORCH)[0])
        copy_in([chunk], weights)
        difference = logits_of_chunk(chunk.eval(), tokens_BS) - copy.deepcopy(theirs.model).double()(tokens_BS).logits
    return difference.abs().max().item()


@pytest.mark.matrix("qwen3_next")
@pytest.mark.parametrize("case", WITH_DELTA_NETS)
def test_logits_of_gated_delta_nets_equal_those_of_transformers(case: str, one_rank: Mesh) -> None:
    """At 1,500 positions, which are 24 chunks. In fp32 the same differs by 2e-4."""
    theirs = oracle(case)
    assert distance_in_double(theirs, theirs.ours, to_global(theirs.tensors, theirs.ours), one_rank, 1500) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("case", TURNED_IN_PART)
def test_logits_of_yarn_on_a_part_of_each_head_equal_those_of_transformers(case: str, one_rank: Mesh) -> None:
    """At 1,000 positions, of an original context of 16; YaRN's frequencies are rounded to fp32 in two ways."""
    theirs = oracle(case)
    assert theirs.ours.rope.fraction in (0.25, 0.5) and theirs.ours.rope.scaling == "yarn"
    assert distance_in_double(theirs, theirs.ours, to_global(theirs.tensors, theirs.ours), one_rank, 1000) <= 1e-5


@pytest.mark.matrix("deepseek_v32-yarn")
@pytest.mark.parametrize("case", WITH_INDEXERS)
def test_logits_over_chosen_keys_equal_those_of_transformers(case: str, one_rank: Mesh) -> None:
    """At 1,500 positions: a query attends to 8 of them, and the scores are computed in three blocks of queries.

    YaRN's frequencies are rounded to fp32 in two ways, by which the angles of far positions would change choices.
    """
    theirs = oracle(case)
    length = 150 if case.endswith("yarn") else 1500
    weights = to_global(theirs.tensors, theirs.ours)
    assert distance_in_double(theirs, theirs.ours, weights, one_rank, length) <= 1e-5


def with_(model: ModelConfig, section: str, **changes: object) -> ModelConfig:
    """The model with other fields of itself, or of one of its sections."""
    if section == "model":
        return model.model_copy(update=changes)
    return model.model_copy(update={section: getattr(model, section).model_copy(update=changes)})


WRONG_CONFIGS: dict[str, tuple[str, str, dict[str, object]]] = {
    "gates not normalized": ("qwen3_moe", "moe", {"normalize_top_k": False}),
    "gates normalized": ("qwen3_moe-raw-gates", "moe", {"normalize_top_k": True}),
    "one expert more": ("mixtral", "moe", {"top_k": 3}),
    "theta": ("mixtral", "rope", {"theta": 1e4}),
    "epsilon of the norms": ("llama", "model", {"norm_eps": 1e-3}),
    "llama3 stretching dropped": ("llama-llama3", "rope", {"scaling": "none"}),
    "yarn dropped": ("qwen3-yarn", "rope", {"scaling": "none"}),
    "yarn dropped from latent attention": ("deepseek_v3-yarn", "rope", {"scaling": "none"}),
    "mscale_all_dim dropped": ("deepseek_v3-yarn", "rope", {"mscale_all_dim": 0.0}),
    "groups dropped": ("deepseek_v3", "moe", {"num_groups": None, "top_groups": None}),
    "half of the rotation": ("glm4_moe", "rope", {"fraction": 1.0}),
    "groups of glm4_moe dropped": ("glm4_moe", "moe", {"num_groups": None, "top_groups": None}),
    "scaling factor of glm4_moe dropped": ("glm4_moe", "moe", {"routed_scaling": 1.0}),
    "gates of qwen2_moe normalized": ("qwen2_moe", "moe", {"normalize_top_k": True}),
    "gates of olmoe normalized": ("olmoe", "moe", {"normalize_top_k": True}),
    "gates of deepseek_v2 normalized": ("deepseek_v2", "moe", {"normalize_top_k": True}),
    "groups of deepseek_v2 dropped": ("deepseek_v2", "moe", {"num_groups": None, "top_groups": None}),
    "scaling factor of deepseek_v2 dropped": ("deepseek_v2", "moe", {"routed_scaling": 1.0}),
    "yarn dropped from deepseek_v2": ("deepseek_v2-lite", "rope", {"scaling": "none"}),
    "window dropped": ("gpt_oss", "model", {"sliding_window": None}),
    "one position more in the window": ("gpt_oss", "model", {"sliding_window": 8}),
    "yarn's range rounded": ("gpt_oss", "rope", {"truncate": True}),
    "yarn of whole heads": ("glm4_moe-yarn", "rope", {"fraction": 1.0}),
    "groups of glm4_moe_lite dropped": ("glm4_moe_lite", "moe", {"num_groups": None, "top_groups": None}),
    "scaling factor of glm4_moe_lite dropped": ("glm4_moe_lite", "moe", {"routed_scaling": 1.0}),
    "groups of dots1 dropped": ("dots1", "moe", {"num_groups": None, "top_groups": None}),
    "groups of solar_open dropped": ("solar_open", "moe", {"num_groups": None, "top_groups": None}),
    "whole heads of minimax_m2 turned": ("minimax_m2", "rope", {"fraction": 1.0}),
    "one expert more of minimax_m2": ("minimax_m2", "moe", {"top_k": 3}),
    "theta of mistral": ("mistral", "rope", {"theta": 1e6}),
    "whole heads of qwen3_next turned": ("qwen3_next", "rope", {"fraction": 1.0}),
    "gates of qwen3_next not normalized": ("qwen3_next", "moe", {"normalize_top_k": False}),
    "one key more": ("deepseek_v32", "indexer", {"top_k": 9}),
    "one key less": ("glm_moe_dsa-shared", "indexer", {"top_k": 7}),
    "all keys": ("glm_moe_dsa", "indexer", {"top_k": 1500}),
    "halves of an index head as pairs": ("deepseek_v32", "model", {"family": "glm_moe_dsa"}),
    "pairs of an index head as halves": ("glm_moe_dsa", "model", {"family": "deepseek_v32"}),
    "scaling factor dropped": ("deepseek_v3", "moe", {"routed_scaling": 1.0}),
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", WRONG_CONFIGS)
def test_a_mistake_in_the_config_changes_the_logits(mistake: str, one_rank: Mesh) -> None:
    case, section, changes = WRONG_CONFIGS[mistake]
    theirs = oracle(case)
    weights = to_global(theirs.tensors, theirs.ours)
    length = 512 if case == "llama-llama3" else 32
    assert distance(theirs, with_(theirs.ours, section, **changes), weights, one_rank, length) > SEEN


def test_activations_of_gpt_oss_are_cut_off_at_seven(one_rank: Mesh) -> None:
    ours = oracle("gpt_oss")
    weights = to_global(ours.tensors, ours.ours)
    for limit in (6.0, 8.0):
        theirs = oracle("gpt_oss", swiglu_limit=limit)
        assert all(torch.equal(theirs.tensors[name], tensor) for name, tensor in ours.tensors.items())
        assert distance(theirs, ours.ours, weights, one_rank) > SEEN


def test_the_latents_norms_have_an_epsilon_of_their_own(one_rank: Mesh) -> None:
    theirs = oracle("deepseek_v3")
    weights = to_global(theirs.tensors, theirs.ours)
    assert theirs.ours.norm_eps == 1e-5
    assert distance(theirs, with_(theirs.ours, "mla", norm_eps=1e-5), weights, one_rank) > 2 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("deepseek_v3", r"model.mla.norm_eps=1e-06 and model.norm_eps=1e-05"),
        (
            "deepseek_v2-three-groups",
            r'ranks a group of experts by its best 1, .* by its best 2 .* Set platform.layers="torch"',
        ),
        ("olmoe", r'olmoe norms .* Set platform.layers="torch"'),
    ],
)
def test_transformer_engine_refuses_what_its_layers_do_not_compute(case: str, message: str, one_rank: Mesh) -> None:
    """It knows one epsilon, ranks groups by other experts, and norms each head by itself."""
    settings = PlatformConfig()
    platform = dataclasses.replace(start(settings), layers="te")
    with pytest.raises(ConfigError, match=message):
        transformer_config(oracle(case).ours, one_rank, platform, settings)


@pytest.mark.parametrize("case", ["deepseek_v2-three-groups", "deepseek_v3-three-a-group"])
def test_groups_ranked_as_megatron_ranks_them_change_the_logits(
    case: str, one_rank: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = oracle(case)
    weights = to_global(theirs.tensors, theirs.ours)
    monkeypatch.setattr(Family, "own_group_score", lambda family, model: None)
    assert distance(theirs, theirs.ours, weights, one_rank) > SEEN


def swap(tensors: Tensors, one: str, other: str) -> Tensors:
    """`tensors` with each name that holds `one` and its counterpart with `other` exchanged."""
    assert any(one in name for name in tensors)
    exchange = {one: other, other: one}
    return {
        next((name.replace(a, b) for a, b in exchange.items() if a in name), name): tensor
        for name, tensor in tensors.items()
    }


def replaced(tensors: Tensors, end: str, change: Callable[[Tensor], Tensor]) -> Tensors:
    """`tensors` with those changed whose name ends so."""
    assert any(name.endswith(end) for name in tensors)
    return {name: change(t) if name.endswith(end) else t for name, t in tensors.items()}


def rotated(tensors: Tensors, num_experts: int) -> Tensors:
    """Expert e under the name of expert e + 1."""
    for e in range(num_experts - 1):
        tensors = swap(tensors, f".experts.{e}.", f".experts.{e + 1}.")
    return tensors


def deinterleaved(q_b: Tensor) -> Tensor:
    """The rotary rows of each head with the even ones first, as other converters store them."""
    nope, rotary = q_b.view(6, 24, -1).split([16, 8], dim=1)
    return torch.cat([nope, rotary[:, 0::2], rotary[:, 1::2]], dim=1).reshape(q_b.shape)


def exchanged(gate_up: Tensor) -> Tensor:
    """gpt-oss's columns of gate and up-projection, each in the other's place."""
    return torch.stack([gate_up[..., 1::2], gate_up[..., 0::2]], -1).flatten(-2)


def halves_for_turns(gate_up: Tensor) -> Tensor:
    """All columns of the gate, then those of the up-projection, as the other families have them."""
    return torch.cat([gate_up[..., 0::2], gate_up[..., 1::2]], -1)


def halves_exchanged(query: Tensor) -> Tensor:
    """qwen3_next's query projection with the gate of each head before its query."""
    return query.unflatten(0, (4, 2, -1)).flip(1).reshape(query.shape)


def values_and_gates_exchanged(qkvz: Tensor) -> Tensor:
    """The rows of values and of gates of each key head, each in the other's place."""
    query, key, value, z = qkvz.unflatten(0, (4, -1)).split([16, 16, 48, 48], 1)
    return torch.cat([query, key, z, value], 1).reshape(qkvz.shape)


WRONG_TENSORS: dict[str, tuple[Any, ...]] = {
    "two experts swapped": ("qwen3_moe", swap, "layers.1.mlp.experts.2.", "layers.1.mlp.experts.5."),
    "two experts of deepseek_v3 swapped": ("deepseek_v3", swap, "2.mlp.experts.0.", "2.mlp.experts.1."),
    "experts rotated": ("mixtral", rotated, 6),
    "gate and up swapped in experts": ("mixtral", swap, ".w1.", ".w3."),
    "gate and up swapped": ("llama", swap, ".gate_proj.", ".up_proj."),
    "gate and up swapped in the shared expert": (
        "deepseek_v3",
        swap,
        "shared_experts.gate_proj.",
        "shared_experts.up_proj.",
    ),
    "two layers swapped": ("qwen3", swap, "layers.0.", "layers.1."),
    "query and key norms swapped": ("qwen3", swap, ".q_norm.", ".k_norm."),
    "norms dropped": ("qwen3_moe", replaced, "norm.weight", torch.ones_like),
    "expert bias dropped": ("deepseek_v3", replaced, "correction_bias", torch.zeros_like),
    "expert bias rounded": ("deepseek_v3", replaced, "correction_bias", lambda b: (b * 4).round() / 4),
    "shared expert dropped": ("deepseek_v3", replaced, "shared_experts.down_proj.weight", torch.zeros_like),
    "biases dropped": ("qwen2", replaced, "_proj.bias", torch.zeros_like),
    "biases of values reversed": ("qwen2", replaced, "v_proj.bias", lambda b: b.flip(0)),
    "gate of the shared expert dropped": ("qwen2_moe", replaced, "shared_expert_gate.weight", torch.zeros_like),
    "norms of queries dropped": ("glm4_moe", replaced, "q_norm.weight", torch.ones_like),
    "expert bias of glm4_moe dropped": ("glm4_moe", replaced, "correction_bias", torch.zeros_like),
    "full norm of keys dropped": ("olmoe", replaced, "k_norm.weight", torch.ones_like),
    "full norm of queries reversed": ("olmoe", replaced, "q_norm.weight", lambda w: w.flip(0)),
    "full norm of keys of minimax_m2 reversed": ("minimax_m2", replaced, "k_norm.weight", lambda w: w.flip(0)),
    "expert bias of minimax_m2 dropped": ("minimax_m2", replaced, "correction_bias", torch.zeros_like),
    "gate and up of minimax_m2 swapped": ("minimax_m2", swap, ".w1.", ".w3."),
    "expert bias of glm4_moe_lite dropped": ("glm4_moe_lite", replaced, "correction_bias", torch.zeros_like),
    "norms of queries of dots1 dropped": ("dots1", replaced, "q_norm.weight", torch.ones_like),
    "biases of solar_open dropped": ("solar_open-yarn", replaced, "_proj.bias", torch.zeros_like),
    "biases of seed_oss dropped": ("seed_oss", replaced, "_proj.bias", torch.zeros_like),
    "norms of qwen3_next one more": ("qwen3_next", replaced, "layernorm.weight", lambda w: w + 1),
    "norm inside of delta nets one more": ("qwen3_next", replaced, "linear_attn.norm.weight", lambda w: w + 1),
    "queries and gates exchanged": ("qwen3_next", replaced, "q_proj.weight", halves_exchanged),
    "betas and alphas exchanged": ("qwen3_5_text", swap, ".in_proj_a.", ".in_proj_b."),
    "betas and alphas of qwen3_next exchanged": (
        "qwen3_next",
        replaced,
        "in_proj_ba.weight",
        lambda w: w.view(4, 2, 2, -1).flip(1).reshape(w.shape),
    ),
    "values and gates exchanged": ("qwen3_next", replaced, "in_proj_qkvz.weight", values_and_gates_exchanged),
    "queries and keys exchanged": (
        "qwen3_5_moe_text",
        replaced,
        "in_proj_qkv.weight",
        lambda w: torch.cat([w[64:128], w[:64], w[128:]]),
    ),
    "taps reversed": ("qwen3_next", replaced, "conv1d.weight", lambda w: w.flip(-1)),
    "decay forgotten": ("qwen3_next", replaced, "A_log", torch.zeros_like),
    "bias of the decay dropped": ("qwen3_next", replaced, "dt_bias", torch.zeros_like),
    "sinks dropped": ("gpt_oss", replaced, "sinks", lambda s: s - 100),
    "sinks zero": ("gpt_oss", replaced, "sinks", torch.zeros_like),
    "router bias dropped": ("gpt_oss", replaced, "router.bias", torch.zeros_like),
    "biases of outputs dropped": ("gpt_oss", replaced, "o_proj.bias", torch.zeros_like),
    "biases of experts dropped": ("gpt_oss", replaced, "down_proj_bias", torch.zeros_like),
    "gate and up exchanged": ("gpt_oss", replaced, "gate_up_proj", exchanged),
    "biases of gate and up exchanged": ("gpt_oss", replaced, "gate_up_proj_bias", exchanged),
    "gate above up": ("gpt_oss", replaced, "gate_up_proj", halves_for_turns),
    "two fused experts swapped": ("gpt_oss", replaced, "1.mlp.experts.down_proj", lambda w: w[[1, 0, 2, 3, 4, 5]]),
    "norm of index keys dropped": ("deepseek_v32", replaced, "k_norm.weight", torch.ones_like),
    "bias of index keys dropped": ("deepseek_v32", replaced, "k_norm.bias", torch.zeros_like),
    "weights of index heads reversed": ("glm_moe_dsa", replaced, "weights_proj.weight", lambda w: w.flip(0)),
    "indexers of two layers swapped": (
        "glm_moe_dsa-shared",
        swap,
        "layers.0.self_attn.indexer.",
        "layers.2.self_attn.indexer.",
    ),
    "rotary rows permuted": ("deepseek_v3", replaced, "q_b_proj.weight", deinterleaved),
}
"""Case of an oracle, and the change of its tensors with its further arguments."""


@pytest.mark.matrix(
    "two experts of deepseek_v3 swapped",
    "gate and up swapped",
    "two layers swapped",
    "shared expert dropped",
    "biases of values reversed",
    "full norm of keys dropped",
    "full norm of queries reversed",
    "gate and up of minimax_m2 swapped",
    "biases of solar_open dropped",
    "norm inside of delta nets one more",
    "betas and alphas of qwen3_next exchanged",
    "taps reversed",
    "sinks dropped",
    "biases of outputs dropped",
    "gate and up exchanged",
)
@pytest.mark.parametrize("mistake", WRONG_TENSORS)
def test_a_mistake_in_the_weights_changes_the_logits(mistake: str, one_rank: Mesh) -> None:
    case, change, *arguments = WRONG_TENSORS[mistake]
    theirs = oracle(case)
    wrong = change(theirs.tensors, *arguments)
    assert distance(theirs, theirs.ours, to_global(wrong, theirs.ours), one_rank) > SEEN


def test_queries_keys_and_values_below_one_another_are_no_attention(one_rank: Mesh) -> None:
    theirs = oracle("llama")
    weights = to_global(theirs.tensors, theirs.ours)
    qkv = weights["decoder.layers.self_attention.linear_qkv.weight"]
    for layer in range(len(qkv)):
        parts = [theirs.tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        qkv[layer] = torch.cat(parts)
    assert distance(theirs, theirs.ours, weights, one_rank) > SEEN
