"""Functions of ranks that have TransformerEngine: models of both kinds of layers are built, saved and loaded."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families import family_of
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.model import hf_stream
from mcore_rl.model.build import build_model, copy_in, local_shards
from mcore_rl.storage.checkpoints.write import load_weights, save_weights
from mcore_rl.train import setup
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.saving import Checkpoints
from tests.te.seeming import seeming_gpu

Layers = Literal["torch", "te"]
OTHER: dict[Layers, Layers] = {"torch": "te", "te": "torch"}
Tensors = Mapping[str, Tensor]


def settings_of(layers: Layers, precision: Literal["fp32", "bf16"] = "fp32") -> PlatformConfig:
    return PlatformConfig(layers=layers, precision=precision)


def built(model: ModelConfig, mesh: Mesh, settings: PlatformConfig, seed: int = 1) -> list[nn.Module]:
    seed_ranks(seed)
    platform = start(settings)
    assert platform.layers == settings.layers
    return _built(model, mesh, platform, settings)


def described(models: Mapping[str, ModelConfig]) -> dict[str, dict[Layers, Any]]:
    """On the only rank: return for both kinds of layers shape, type and bytes of every weight, and whose modules they
    are; for a model that a kind refuses the message.
    """
    mesh = build_mesh(MeshConfig())
    found: dict[str, dict[Layers, Any]] = {}
    for name, model in models.items():
        found[name] = {}
        for layers in OTHER:
            try:
                chunks = built(model, mesh, settings_of(layers))
            except ConfigError as error:
                found[name][layers] = str(error)
                continue
            shards: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
            num_bytes: Counter[str] = Counter()
            for shard in local_shards(chunks):
                shards[shard.key] = shard.global_shape, shard.data.dtype
                num_bytes[shard.key] += shard.data.nbytes
            modules = {
                base.__name__
                for chunk in chunks
                for module in chunk.modules()
                for base in type(module).__mro__
                if base.__module__.startswith("transformer_engine.")
            }
            found[name][layers] = {"shards": shards, "bytes": dict(num_bytes), "modules": modules}
    return found


def attentions(models: Mapping[str, ModelConfig], cp: int, precision: Literal["fp32", "bf16"]) -> dict[str, bool]:
    """On the only rank: return whether TransformerEngine's own rules find an attention for each model on a Hopper,
    where cuDNN has a kernel for all shapes and flash-attn is not installed.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    rules: Any = utils
    rules.get_device_compute_capability, rules.get_cudnn_version = lambda: (9, 0), lambda: (9, 18, 0)
    rules._get_fused_attn_backend = lambda *_: rules.FusedAttnBackend.F16_arbitrary_seqlen.value
    return {
        name: any(rules.get_attention_backend(attention_of(model, cp, precision, rules))[-1])
        for name, model in models.items()
    }


def attention_of(model: ModelConfig, cp: int, precision: str, rules: Any) -> Any:
    """Return TransformerEngine's description of the first layer's attention, as Megatron calls it."""
    family, window = family_of(model), model.sliding_window
    mla = (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim)
    keys, values = mla if family.is_latent else (model.head_dim, model.head_dim)
    return rules.AttentionParams(
        qkv_type=Tensor,
        qkv_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        qkv_layout="sbhd_sbhd_sbhd",
        batch_size=1,
        num_heads=model.num_heads,
        num_gqa_groups=model.num_heads if family.is_latent else model.num_kv_heads,
        max_seqlen_q=64,
        max_seqlen_kv=64,
        head_dim_qk=keys,
        head_dim_v=values,
        attn_mask_type="causal",
        window_size=(-1 if window is None else window - 1, 0),
        softmax_type="learnable" if family.has_attention_sinks else "vanilla",
        context_parallel=cp > 1,
        cp_comm_type="p2p",
        cp_size=cp,
    )


def exchanged(
    mesh_config: MeshConfig, models: Mapping[str, tuple[ModelConfig, PlatformConfig, Tensors]], folder: Path
) -> dict[str, int]:
    """On a rank: save each model by one kind of layers and load it by the other, both ways; return the number of
    shards of this rank that were compared with the global tensors that the first kind was given.
    """
    mesh = build_mesh(mesh_config)
    compared: Counter[str] = Counter()
    for name, (model, settings, tensors) in models.items():
        for writer, reader in OTHER.items():
            written = built(model, mesh, settings.model_copy(update={"layers": writer}))
            copy_in(written, tensors)
            path = save_weights(written, mesh, model, folder / name / writer)
            loaded = built(model, mesh, settings.model_copy(update={"layers": reader}), seed=2)
            assert different(loaded, tensors), "random weights would not show that nothing was loaded"
            load_weights(loaded, mesh, model, path)
            assert not different(loaded, tensors), (name, writer, different(loaded, tensors))
            compared[name] += len(list(local_shards(loaded)))
    return dict(compared)


def different(chunks: list[nn.Module], tensors: Tensors) -> list[str]:
    """Return the keys of this rank's shards that are not bit for bit the region of their global tensor."""
    return [
        shard.key
        for shard in local_shards(chunks)
        if not torch.equal(shard.data, tensors[shard.key][shard.where].to(shard.data.dtype))
    ]


def passed_on(
    mesh_config: MeshConfig, checkpoints: Mapping[str, tuple[ModelConfig, Path, Tensors]], folder: Path
) -> dict[str, dict[str, Tensor]]:
    """On a rank: load converted checkpoints by TransformerEngine's layers, compare each shard, and save it to
    `folder / name`. Return the weights of each model as they are streamed to rank 0, in Hugging Face's names.
    """
    mesh = build_mesh(mesh_config)
    streamed: dict[str, dict[str, Tensor]] = {}
    for name, (model, path, tensors) in checkpoints.items():
        chunks = built(model, mesh, settings_of("te"))
        load_weights(chunks, mesh, model, path)
        assert not different(chunks, tensors), (name, different(chunks, tensors))
        save_weights(chunks, mesh, model, folder / name)
        streamed[name] = {}
        for bucket in hf_stream.WeightStream(chunks, mesh, model):
            streamed[name] |= {key: tensor.clone() for key, tensor in bucket.tensors.items()}
    return streamed


def resaved(config: PretrainConfig) -> str:
    """On a rank: load a run's last checkpoint, with its optimizer, by TransformerEngine's layers, and save it as the
    run of `config`. Return the checkpoint that was loaded.
    """
    setup.build_model = _built
    platform = start(config.platform)
    assert platform.layers == "te"
    state = setup.set_up(config, platform)
    folder = RunFolder(Path(config.run_dir))
    fence = folder.claim()
    checkpoints = Checkpoints(state, folder.checkpoints, fence)
    source = checkpoints.resume().source
    checkpoints.save()
    checkpoints.finish()
    fence.release()
    destroy_mesh()
    return str(source)


def _built(*args: Any) -> list[nn.Module]:
    with seeming_gpu():
        return build_model(*args)
