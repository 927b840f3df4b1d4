"""An exported config.json describes the same model, to us and to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mcore_rl.checks.model import checked_hf_config, checked_model_from_hf, model_violations
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.megatron.model import disagreements
from mcore_rl.errors import ConfigError
from mcore_rl.families import FAMILIES, all_families, family_of, hf_config, weight_map
from mcore_rl.families.same_model import model_changes
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.server_process import model_folder
from tests.hf_models import CASES, TOLERANCE, VOCAB, oracle, oracle_of, random_tokens
from tests.hf_weights import to_global
from tests.tiny_models import TINY
from tests.unit.model.test_logits_equal_transformers import logits_of

MEGATRONS_OWN = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def architecture(model: ModelConfig) -> dict[str, Any]:
    """The arguments of Megatron's config that the logits depend on."""
    arguments = family_of(model).architecture(model)
    return {name: value for name, value in arguments.items() if name not in MEGATRONS_OWN}


@pytest.mark.parametrize("case", [*CASES, *FAMILIES])
def test_a_written_config_is_read_as_the_same_model(case: str) -> None:
    model = oracle(case).ours if case in CASES else TINY[case]
    again = checked_model_from_hf(hf_config(model))
    assert architecture(again) == architecture(model)
    assert again.rope == model.rope
    assert disagreements(again, model) == []
    assert (again.norm_eps, again.mtp_layers, again.max_position) == (
        *(model.norm_eps, model.mtp_layers, model.max_position),
    )
    assert weight_map(again).hf_shapes == weight_map(model).hf_shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_makes_a_model_of_it_with_our_names_and_shapes(family: str) -> None:
    model = TINY[family]
    written = hf_config(model)
    config = transformers.AutoConfig.for_model(**written)
    with torch.device("meta"):
        theirs = getattr(transformers, written["architectures"][0])(config).state_dict()
    if model.tied_embeddings:
        del theirs["lm_head.weight"]
    assert {name: tuple(t.shape) for name, t in theirs.items()} == weight_map(model, "fused").hf_shapes


YARN = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_length": 16}
UNSCALED = {"rope.scaling": "none", "rope.factor": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "epsilon": {"norm_eps": 1e-2},
    "theta": {"rope.theta": 777.0},
    "unscaled positions": UNSCALED,
    "unscaled positions, no windows": UNSCALED | {"sliding_window": None},
    "yarn": YARN,
    "yarn of whole heads": YARN | {"rope.fraction": 1.0},
    "yarn, not rounded": YARN | {"rope.truncate": False},
    "yarn, another range": YARN | {"rope.beta_fast": 4.0, "rope.beta_slow": 2.0},
    "yarn, mscale": YARN | {"rope.mscale": 0.7},
    "yarn, both mscales": YARN | {"rope.mscale": 0.7, "rope.mscale_all_dim": 0.4},
    "yarn, mscale_all_dim": YARN | {"rope.mscale": 0.0, "rope.mscale_all_dim": 0.4},
    "yarn by 1": YARN | {"rope.factor": 1.0},
    "llama3": {"rope.scaling": "llama3", "rope.factor": 8.0, "rope.original_length": 8192},
    "a half of heads": {"rope.fraction": 0.5},
    "whole heads": {"rope.fraction": 1.0},
    "tied": {"tied_embeddings": True},
    "not tied": {"tied_embeddings": False},
    "one key/value head": {"num_kv_heads": 1},
    "as many key/value heads": {"num_kv_heads": 4},
    "wider heads": {"head_dim": 24},
    "biases": {"qkv_bias": "on"},
    "no biases": {"qkv_bias": "off"},
    "norms of queries and keys": {"qk_norm": "on"},
    "no norms of queries and keys": {"qk_norm": "off"},
    "windows": {"sliding_window": 7},
    "no windows": {"sliding_window": None},
    "attention alone": {"delta.full_every": 1},
    "attention in the third layer": {"delta.full_every": 3},
    "delta nets of other widths": {"delta.conv_width": 3, "delta.key_dim": 12, "delta.key_heads": 2},
    "another indexer": {"indexer.top_k": 5, "indexer.heads": 16, "indexer.width": 12},
    "a shared choice": {"indexer.shared_layers": (1, 2)},
    "no shared choice": {"indexer.shared_layers": ()},
    "full queries": {"mla.q_lora_rank": None},
    "latent queries": {"mla.q_lora_rank": 24},
    "other latents": {"mla.kv_lora_rank": 24, "mla.qk_nope_head_dim": 12, "mla.v_head_dim": 8},
    "epsilon of latents": {"mla.norm_eps": 1e-2},
    "three experts": {"moe.top_k": 3},
    "one expert": {"moe.top_k": 1, "moe.normalize_top_k": False},
    "raw gates": {"moe.normalize_top_k": False},
    "gates that sum to 1": {"moe.normalize_top_k": True},
    "no dense layer": {"moe.first_dense_layers": 0},
    "two dense layers": {"moe.first_dense_layers": 2},
    "no shared expert": {"moe.shared_experts": 0},
    "two shared experts": {"moe.shared_experts": 2},
    "another shared width": {"moe.shared_experts": 1, "moe.shared_ffn_hidden_size": 48},
    "groups": {"moe.num_groups": 4, "moe.top_groups": 2},
    "all groups": {"moe.num_groups": 2, "moe.top_groups": 2},
    "no groups": {"moe.num_groups": None, "moe.top_groups": None},
    "a factor on gates": {"moe.routed_scaling": 0.3},
    "no factor on gates": {"moe.routed_scaling": 1.0},
    "no bias of the choice": {"moe.expert_bias": False},
    "another width of experts": {"moe.ffn_hidden_size": 24},
}
ALL = set(FAMILIES)
SIGMOID = {name for name, family in all_families().items() if family.router == "sigmoid"}
NOT_IN_TRANSFORMERS = {
    "yarn, mscale": ALL,
    "yarn, mscale_all_dim": ALL,
    "epsilon of latents": {name for name, family in all_families().items() if family.is_latent},
    "one expert": SIGMOID | {"mixtral", "gpt_oss"},
    "raw gates": {"mixtral", "gpt_oss"},
    "two dense layers": {"mixtral", "olmoe"},
    "wider heads": {"olmoe"},
}
"""Settings with which Megatron's model of a family exists, and transformers' does not."""


def with_settings(model: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    values = model.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = values
        for each in sections:
            section = section[each]
        section[name] = value
    return ModelConfig(**values)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model_with_every_setting(family: str, tmp_path: Path) -> None:
    """Its config class reads the file as the model, with its own defaults, or no file is written."""
    refused = {name for name, families in NOT_IN_TRANSFORMERS.items() if family in families}
    for name, changes in SETTINGS.items():
        model = with_settings(TINY[family], changes)
        if list(model_violations(model)) or (changes and not model_changes(as_json(TINY[family]), model)):
            continue
        if name in refused:
            with pytest.raises(ConfigError, match="cannot be this model"):
                checked_hf_config(model)
            continue
        (tmp_path / "config.json").write_text(json.dumps(checked_hf_config(model)))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        bias = {"expert_bias": True} if family in SIGMOID else {}
        model = model.model_copy(update={"moe": model.moe.model_copy(update=bias)})
        assert model_changes(as_json(model), checked_model_from_hf(theirs)) == [], name


def as_json(model: ModelConfig) -> dict[str, Any]:
    return model.model_dump(mode="json")


@pytest.mark.full
@pytest.mark.parametrize("setting", ["unscaled positions", "no windows", "unscaled positions, no windows"])
def test_an_exported_gpt_oss_has_its_logits_in_transformers(setting: str, tmp_path: Path, one_rank: Mesh) -> None:
    model = with_settings(TINY["gpt_oss"], SETTINGS[setting])
    (tmp_path / "config.json").write_text(json.dumps(checked_hf_config(model)))
    theirs = oracle_of(transformers.AutoConfig.from_pretrained(tmp_path), "GptOssForCausalLM")
    tokens_BS = random_tokens()
    ours = logits_of(model, to_global(theirs.tensors, model), tokens_BS, one_rank)
    assert (ours - theirs.logits(tokens_BS)[..., :VOCAB]).abs().max() <= TOLERANCE


def test_started_servers_in_fp8_are_told_which_matrices_are_not(tmp_path: Path) -> None:
    """Routers, the shared expert's gate and both vocabularies stay as trained, as in published folders."""
    folder = model_folder(TINY["qwen2_moe"], "bfloat16", tmp_path, in_fp8=True)
    config = json.loads((folder / "config.json").read_text())
    gates = [f"model.layers.{i}.mlp.{name}" for i in range(4) for name in ("gate", "shared_expert_gate")]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": sorted(["lm_head", "model.embed_tokens", *gates]),
    }
    plain = json.loads((model_folder(TINY["qwen2_moe"], "bfloat16", tmp_path) / "config.json").read_text())
    assert config == plain | {"quantization_config": config["quantization_config"]}


def test_started_servers_get_no_config_of_another_model(tmp_path: Path) -> None:
    model = with_settings(TINY["mixtral"], SETTINGS["raw gates"])
    with pytest.raises(ConfigError, match="normalize_top_k is false there, true here"):
        model_folder(model, "bfloat16", tmp_path)
