"""Megatron's own HybridModel reads what is converted for it, computes what transformers does, and is read back."""

import copy
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpointing import _maybe_setup_gpt_to_hybrid_load

from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.megatron.model import KeyLayout, KeyNames, open_dist_model
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import local_shards, unwrap
from mcore_rl.model.layers.linear import RMSNorm
from mcore_rl.model.spec import _layer_spec
from mcore_rl.model.transformer_config import transformer_config
from mcore_rl.storage.checkpoints.write import sharding_metadata
from tests.conversion import assert_same, exported, imported, read_dist, read_hf, saved
from tests.hf_models import TOLERANCE, VOCAB, oracle, random_tokens
from tests.unit.convert.test_layouts import relaid

CASES: list[tuple[str, KeyNames]] = [
    ("qwen3_moe", "te"),
    ("glm4_moe", "te"),
    ("qwen3", "te"),
    ("qwen3_moe", "local"),
    ("llama", "local"),
]
MOMENTS = "optimizer.state.exp_avg."
STRICT = "assume_ok_unexpected"
"""Megatron-LM's default: every tensor and every object of the model must be in the checkpoint."""


def halves(layer: ModuleSpec) -> tuple[ModuleSpec, ModuleSpec]:
    attention = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    mlp = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    first, second = (
        ModuleSpec(module=layer.module, submodules=replace(layer.submodules, **without)) for without in (attention, mlp)
    )
    return first, second


def stack_spec(config: TransformerConfig, keys: KeyNames) -> ModuleSpec:
    """HybridModel's layers without TransformerEngine: ours, with its names of the keys, or Megatron's local layers."""

    def layer(is_moe: bool) -> ModuleSpec:
        if keys == "te":
            return _layer_spec(config, LayerKind("attention", is_moe), None)
        experts = config.num_moe_experts if is_moe else None
        return get_gpt_layer_local_spec(
            experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )

    dense, experts = halves(layer(False)), halves(layer(config.num_moe_experts is not None))
    submodules = hybrid_block.HybridStackSubmodules(attention_layer=dense[0], mlp_layer=dense[1], moe_layer=experts[1])
    return ModuleSpec(module=hybrid_block.HybridStack, submodules=submodules)


def hybrid_model(model: ModelConfig, pattern: str, keys: KeyNames, mesh: Mesh) -> HybridModel:
    settings = PlatformConfig(precision="fp32", layers="torch")
    config = copy.copy(transformer_config(model, mesh, start(settings), settings))
    config.num_layers = len(pattern)
    # The last norm is TransformerEngine's by its name, not by the spec.
    with patch.object(hybrid_block, "TENorm", RMSNorm):
        return HybridModel(
            config,
            stack_spec(config, keys),
            vocab_size=model.padded_vocab_size,
            max_sequence_length=model.max_position,
            hybrid_layer_pattern=pattern,
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=model.rope.fraction,
            rotary_base=model.rope.theta,
        ).eval()


def args_of(checkpoint: Path) -> Namespace:
    args: Namespace = torch.load(checkpoint / "common.pt", weights_only=False)["args"]
    return args


def loaded(checkpoint: Path, keys: KeyNames, mesh: Mesh) -> HybridModel:
    """A HybridModel of the pattern in a checkpoint's arguments, with its weights, as Megatron-LM loads them."""
    pattern = args_of(checkpoint).hybrid_layer_pattern
    hybrid = hybrid_model(open_dist_model(checkpoint).model, pattern, keys, mesh)
    state: dict[str, Any] = {"model": hybrid.sharded_state_dict(metadata=sharding_metadata(mesh))}
    found = dist_checkpointing.load(state, str(checkpoint), strict=STRICT)
    hybrid.load_state_dict(found["model"])
    return hybrid


def moments(hybrid: HybridModel, mesh: Mesh) -> dict[str, ShardedTensor]:
    """A state as Megatron's optimizer shards it, like the weights under another prefix: twice the weights."""
    weights = hybrid.sharded_state_dict(metadata=sharding_metadata(mesh))
    apply_factories(weights)
    return {
        str(index): replace(shard, key=MOMENTS + shard.key, data=2 * shard.data)
        for index, shard in enumerate(nested_values(weights))
        if isinstance(shard, ShardedTensor)
    }


@pytest.mark.parametrize(("case", "keys"), CASES)
def test_the_hybrid_model_computes_what_transformers_does_with_an_imports_weights(
    case: str, keys: KeyNames, one_rank: Mesh, tmp_path: Path
) -> None:
    checkpoint = imported(saved(case, tmp_path / "hf"), tmp_path / "ckpt", keys=keys, layers="hybrid")
    hybrid = loaded(checkpoint, keys, one_rank)
    tokens_BS = random_tokens()
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    length = tokens_BS.shape[1]
    later_11SS = torch.ones(1, 1, length, length).triu(1).bool()
    with torch.no_grad():
        logits_BSV = hybrid(tokens_BS, positions_BS, later_11SS if keys == "local" else None)
    assert (logits_BSV[..., :VOCAB] - oracle(case).logits(tokens_BS)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("case", "keys"), CASES)
def test_a_checkpoint_that_the_hybrid_model_saves_is_exported_bit_for_bit(
    case: str, keys: KeyNames, one_rank: Mesh, tmp_path: Path
) -> None:
    source = saved(case, tmp_path / "hf")
    ours = imported(source, tmp_path / "ours", keys=keys, layers="hybrid")
    hybrid, theirs = loaded(ours, keys, one_rank), tmp_path / "theirs/iter_0000007"
    theirs.mkdir(parents=True)
    state: dict[str, Any] = {
        "args": args_of(ours),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": hybrid.sharded_state_dict(metadata=sharding_metadata(one_rank)),
        "optimizer": moments(hybrid, one_rank),
    }
    dist_checkpointing.save(state, str(theirs))

    found = read_dist(theirs)
    assert_same({key: found[key] for key in found if not key.startswith(MOMENTS)}, read_dist(ours))
    assert open_dist_model(theirs, source).layout.layers == "hybrid"
    assert_same(read_hf(exported(theirs, tmp_path / "back", reference=source)), read_hf(source))
    native = read_dist(relaid(theirs, tmp_path / "native", KeyLayout("te", "each"), source))
    weights = read_dist(imported(source, tmp_path / "again", layers="each"))
    assert_same(native, weights | {MOMENTS + key: 2 * weights[key] for key in weights})


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3"])
def test_megatrons_own_reading_of_gpt_models_layers_gives_the_same_hybrid_model(
    case: str, one_rank: Mesh, tmp_path: Path
) -> None:
    source = saved(case, tmp_path / "hf")
    ours = loaded(imported(source, tmp_path / "hybrid", layers="hybrid"), "te", one_rank)
    native = imported(source, tmp_path / "native")
    theirs = hybrid_model(open_dist_model(native).model, ours.hybrid_layer_pattern, "te", one_rank)
    state = theirs.sharded_state_dict(metadata=sharding_metadata(one_rank))
    maps = gpt_compatible_layer_maps(ours.hybrid_layer_pattern)
    retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)
    theirs.load_state_dict(dist_checkpointing.load({"model": state}, str(native), strict=STRICT)["model"])
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_megatron_lm_knows_by_the_arguments_whose_layers_a_checkpoint_has(one_rank: Mesh, tmp_path: Path) -> None:
    """It reads the names of a HybridModel's checkpoint as they are, and GPTModel's through maps of layers."""
    source = saved("qwen3_moe", tmp_path / "hf")
    hybrid, native = (args_of(imported(source, tmp_path / layers, layers=layers)) for layers in ("hybrid", "stacked"))
    model = hybrid_model(oracle("qwen3_moe").ours, hybrid.hybrid_layer_pattern, "te", one_rank)
    run = Namespace(hybrid_layer_pattern=hybrid.hybrid_layer_pattern, no_load_optim=True)
    assert _maybe_setup_gpt_to_hybrid_load(run, hybrid, [model]) == (None, False)
    maps, _ = _maybe_setup_gpt_to_hybrid_load(run, native, [model])
    assert maps.num_gpt_layers == native.num_layers == 3


def test_the_hybrid_model_is_unwrapped_like_ours(one_rank: Mesh) -> None:
    """Code that walks models does not ask for their class: shards have the names and places that a model gives them."""
    model = oracle("qwen3_moe").ours
    hybrid = hybrid_model(model, "*E*E*E", "te", one_rank)
    hybrid.config.bf16 = True
    wrapped = Float16Module(hybrid.config, hybrid)
    assert unwrap(wrapped) is hybrid
    shards = {shard.key: shard.data for shard in local_shards([wrapped])}
    router, norm = hybrid.decoder.layers[5].mlp.router.weight, hybrid.decoder.final_norm.weight
    assert shards["decoder.layers.5.mlp.router.weight"].data_ptr() == router.data_ptr()
    assert shards["decoder.final_norm.weight"].data_ptr() == norm.data_ptr()
