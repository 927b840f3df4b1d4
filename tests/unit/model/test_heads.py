"""A model with a scalar head: its scores by a product in float64, its size, and its ways through checkpoints."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import weight_map
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import build_model, local_shards, unwrap
from mcore_rl.model.heads import ScoreLayer
from mcore_rl.planning.weights import weights_by_stage
from mcore_rl.storage.checkpoint import reference_to
from mcore_rl.storage.checkpoints.write import load_weights, save_weights
from tests.tiny_models import TINY

MTP = TINY["deepseek_v3"].model_copy(update={"mtp_layers": 1})


def built(model: ModelConfig, mesh: Mesh, **settings: str) -> torch.nn.Module:
    platform = PlatformConfig(**settings)  # type: ignore[arg-type]
    return build_model(model, mesh, start(platform), platform)[0].eval()


def head_of(chunk: torch.nn.Module) -> ScoreLayer:
    layer = unwrap(chunk).output_layer
    assert isinstance(layer, ScoreLayer)
    return layer


def scores(chunk: torch.nn.Module, tokens_BS: Tensor) -> Tensor:
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    with torch.no_grad():
        output: Tensor = chunk(tokens_BS, positions_BS, None)
    return output


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_score_is_the_product_of_hidden_state_and_weight_less_the_shift(precision: str, one_rank: Mesh) -> None:
    chunk = built(TINY["qwen3_moe"].scored, one_rank, precision=precision)
    layer = head_of(chunk)
    hidden: list[Tensor] = []
    unwrap(chunk).decoder.register_forward_hook(lambda *arguments: hidden.append(arguments[-1]))
    with torch.no_grad():
        layer.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        layer.shift.fill_(0.123456789)
    tokens_BS = torch.randint(0, 120, (2, 7), generator=torch.Generator().manual_seed(0))
    scores_BS1 = scores(chunk, tokens_BS)
    expected = hidden[0].double() @ layer.weight.double().T - 0.123456789
    assert scores_BS1.shape == (2, 7, 1) and scores_BS1.dtype == torch.float32
    assert (scores_BS1.double() - expected.transpose(0, 1)).abs().max() < 2e-6
    assert layer.shift.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3", "deepseek_v3"])
def test_a_model_with_scores_has_the_weights_of_its_rules_and_of_the_estimate(name: str, one_rank: Mesh) -> None:
    model = TINY[name].scored
    shards = list(local_shards([built(model, one_rank)]))
    weights = weight_map(model)
    weights.prove()
    assert {shard.key: shard.global_shape for shard in shards} == weights.mcore_shapes
    assert weights.hf_shapes["score.weight"] == (1, model.hidden_size)
    assert "lm_head.weight" not in weights.hf_shapes
    assert {"score.shift"} <= weights.fp32_keys
    (estimate,) = weights_by_stage(model, MeshConfig())
    # The shift and the routers' expert biases are no weights: no gradient trains them.
    trained = [shard for shard in shards if not shard.key.endswith(("score.shift", "expert_bias"))]
    assert sum(shard.data.numel() for shard in trained) == estimate.total


@pytest.mark.full
def test_adapters_and_a_head_alone_are_read_over_their_language_model(one_rank: Mesh, tmp_path: Path) -> None:
    model, lora = MTP, LoraConfig(rank=4)
    base = save_weights([built(model, one_rank)], one_rank, model, tmp_path / "logits")

    def adapted() -> nn.Module:
        chunk = built(model.scored, one_rank)
        add_adapters([chunk], lora, model.scored, seed=0)
        return chunk

    chunk = adapted()
    load_weights([chunk], one_rank, model.scored, base)
    with torch.no_grad():
        for param in (param for param in chunk.parameters() if param.requires_grad):
            param.normal_()
        head_of(chunk).shift.fill_(0.3)
    path = save_weights([chunk], one_rank, model.scored, tmp_path / "scores", reference_to(base))
    again = adapted()
    assert load_weights([again], one_rank, model.scored, path).has_scores
    tokens_BS = torch.arange(12).reshape(2, 6)
    assert torch.equal(scores(again, tokens_BS), scores(chunk, tokens_BS))
    assert sum(file.stat().st_size for file in path.iterdir()) < sum(file.stat().st_size for file in base.iterdir())


@pytest.mark.matrix("mtp")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3", "mtp"])
def test_layers_come_from_a_language_model_and_the_head_from_a_model_with_scores(
    name: str, one_rank: Mesh, tmp_path: Path
) -> None:
    model = MTP if name == "mtp" else TINY[name]
    language_model = built(model, one_rank)
    path = save_weights([language_model], one_rank, model, tmp_path / "logits")
    chunk = built(model.scored, one_rank)
    stored = load_weights([chunk], one_rank, model.scored, path)
    assert not stored.has_scores
    theirs = {shard.key: shard.data for shard in local_shards([language_model])}
    ours = {shard.key: shard.data for shard in local_shards([chunk])}
    assert ours.pop("score.weight").eq(0).all() and ours.pop("score.shift") == 0
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())

    with torch.no_grad():
        head_of(chunk).weight.normal_()
        head_of(chunk).shift.fill_(0.3)
    path = save_weights([chunk], one_rank, model.scored, tmp_path / "scores")
    again = built(model.scored, one_rank)
    assert load_weights([again], one_rank, model.scored, path).has_scores
    tokens_BS = torch.arange(12).reshape(2, 6)
    assert torch.equal(scores(again, tokens_BS), scores(chunk, tokens_BS))
    with pytest.raises(CheckpointError, match="is of a reward model or a critic"):
        load_weights([language_model], one_rank, model, path)
