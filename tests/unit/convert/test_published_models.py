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
from tests.hf_models import PUBLISHED, Oracle, Tensors, as_saved, oracle_of, random_tokens
from tests.hf_weights import to_global
from tests.parallel.parity import largest, relative_errors
from tests.unit.model.test_gradients_equal_transformers import eager, our_gradients
from tests.unit.planning.test_memory import saved_numbers

SINGLE = (
    *("Qwen3-Next-80B-A3B", "MiniMax-M2", "DeepSeek-V3.2", "GLM-4.7-Flash", "dots.llm1", "Solar-Open-100B"),
    "Seed-OSS-36B",
)
"""Models of which a family has no other size: they are scaled twice."""
TWO_OF_A_FAMILY = (
    *("Qwen3.5-35B-A3B", "Qwen3.5-397B-A17B", "Qwen3.5-0.8B", "Qwen3.5-27B", "GLM-5", "GLM-5.2"),
    *("DeepSeek-V2", "DeepSeek-V2-Lite", "Mistral-7B-v0.3", "Mistral-Nemo-12B"),
)
CASES = {name: (name, 32, 8 if name == "GLM-5.2" else 5) for name in (*SINGLE, *TWO_OF_A_FAMILY)}
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


@pytest.mark.full
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


@pytest.mark.matrix("Qwen3.5-0.8B")
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
