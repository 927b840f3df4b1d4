"""Messages of tensor parallelism beside products: Megatron's config. TransformerEngine's part needs GPUs."""

from dataclasses import replace

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import ConfigError
from mcore_rl.model.transformer_config import transformer_config
from mcore_rl.train.setup import user_buffer_shape
from tests.fake_world import fake_platform, fake_rank
from tests.ranks import run_ranks
from tests.tiny_models import TINY


@pytest.mark.parametrize("kind", [PretrainConfig, SFTConfig])
def test_buffers_have_the_tokens_of_a_microbatch_on_all_tensor_parallel_ranks(kind: type[PretrainConfig]) -> None:
    words = ["data.seq_length=64", "train.micro_batch=3", "mesh.cp=2", "mesh.tp=4", "model.hidden_size=96"]
    config = load_config(kind, None, words)
    found = user_buffer_shape(config.train, config.packed_length, config.mesh.cp, config.model.hidden_size)
    assert found == [3 * 64 // 2, 96]


def overlap_of(layers: str) -> tuple[bool, bool]:
    """On a rank: Megatron's fields for the mesh with the overlap."""
    settings = PlatformConfig(precision="bf16")
    with fake_rank(MeshConfig(tp=2, overlap_tp=True), 0, 2) as mesh:
        platform = replace(fake_platform(settings, mesh), layers=layers)
        # Latent attention has no fused rotary embedding, for which Megatron would look for TransformerEngine.
        config = transformer_config(TINY["deepseek_v3"], mesh, platform, settings)
        return config.tp_comm_overlap, config.sequence_parallel


def test_megatrons_config_has_the_overlap_where_layers_are_of_transformer_engine() -> None:
    assert run_ranks(overlap_of, 1, "te")[0] == (True, True)
    with pytest.raises(ConfigError, match=r"mesh.overlap_tp=true needs the layers of TransformerEngine"):
        overlap_of("torch")
