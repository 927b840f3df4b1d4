"""Inputs of programs: the tokenizer that a model was trained with, and a model with stored weights."""

from pathlib import Path

from torch import nn

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.model.build import build_model
from mcore_rl.storage.checkpoints.read import StoredCheckpoint, inspect
from mcore_rl.storage.checkpoints.write import load_weights, refuse_other_adapters
from mcore_rl.storage.folders import read_run, run_of_checkpoint


def load_matching_tokenizer(config: TokenizerConfig, model: ModelConfig, checkpoint: str | None) -> Tokenizer:
    """Load the tokenizer for training that starts from `checkpoint`, if any. Raises DataError if the model's vocabulary
    is too small, or the checkpoint was trained with another tokenizer.
    """
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"the tokenizer {config.path} has {tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{model.vocab_size}. Name the tokenizer that the model was trained with."
        )
    refuse_other_tokenizer(tokenizer, checkpoint)
    return tokenizer


def refuse_other_tokenizer(tokenizer: Tokenizer, checkpoint: str | None, field: str = "checkpoint.load") -> None:
    """Raise a DataError if the run that wrote `checkpoint`, named in `field`, used another tokenizer: ids would mean
    different text.

    Nothing is refused without a checkpoint, or if it was converted or its tokenizer is gone, because nothing is known.
    If a pretraining named no tokenizer, the tokenizer that its data was made with is compared.
    """
    folder = run_of_checkpoint(Path(checkpoint)) if checkpoint else None
    if folder is None or not (folder / "checkpoints").is_dir():
        return
    run = read_run(folder)
    trained_with = run.tokenizer
    if trained_with.path is None:
        from mcore_rl.data.index_file import read_sidecar  # only runs that begin with a pretraining

        for prefix in run.data:
            origin = read_sidecar(prefix)
            if origin is not None and origin.tokenizer_digest != tokenizer.digest:
                raise DataError(
                    f"{field}={checkpoint} is of a run on {prefix}, which was made with another tokenizer "
                    f"({prefix}.json has its SHA-256) than data.tokenizer.path names: the model would read other "
                    "tokens than it has learned. Name that one."
                )
    if trained_with.path is None or not Path(trained_with.path).exists():
        return
    if load_tokenizer(trained_with).digest != tokenizer.digest:
        raise DataError(
            f"{field}={checkpoint} is of a run with the tokenizer {trained_with.path}, data.tokenizer.path "
            "names another: the model would read other tokens than it has learned. Name that one, or another "
            "checkpoint."
        )


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
        from mcore_rl.model.adapters import add_adapters, fill_adapters  # only models with adapters

        add_adapters(chunks, lora, model, seed=0)  # B is 0 until it is filled
    refuse_other_adapters(inspect(source), lora)
    stored = load_weights(chunks, mesh, model, source, allowed=allowed)
    if lora.load is not None and not stored.has_adapters:
        from mcore_rl.convert.peft import read_peft  # only runs that begin with such adapters

        fill_adapters(chunks, read_peft(Path(lora.load), lora, model))
    return chunks, stored
