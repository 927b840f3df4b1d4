"""A model with a checkpoint's weights, including low-rank adapters, for programs that do not train."""

from pathlib import Path

from torch import nn

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.peft import read_peft
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.model.adapters import add_adapters, fill_adapters
from mcore_rl.model.build import build_model
from mcore_rl.storage.checkpoints.read import StoredCheckpoint, inspect
from mcore_rl.storage.checkpoints.write import load_weights, refuse_other_adapters


def load_model(
    model: ModelConfig,
    lora: LoraConfig,
    mesh: Mesh,
    platform: Platform,
    settings: PlatformConfig,
    source: Path,
    *,
    allowed: tuple[str, ...] | None = None,
) -> tuple[list[nn.Module], StoredCheckpoint]:
    """Collective over the world: return the chunks of a model with the weights of a checkpoint, and that checkpoint.

    Adapters of the section `lora` are read from the checkpoint or, if it has none, from `lora.load`; without either
    they add nothing. `allowed` and the errors raised are as for `load_weights`.
    """
    chunks = build_model(model, mesh, platform, settings)
    if lora.is_on:
        add_adapters(chunks, lora, model, seed=0)  # B is 0 until it is filled
    refuse_other_adapters(inspect(source), lora)
    stored = load_weights(chunks, mesh, model, source, allowed=allowed)
    if lora.load is not None and not stored.has_adapters:
        fill_adapters(chunks, read_peft(Path(lora.load), lora, model))
    return chunks, stored
