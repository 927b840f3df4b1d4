"""The model and tokenizer of a run of any kind, as the config.toml in its folder names them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.load import section_of_run
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """The parts of a run's config.toml that runs of all kinds have."""

    model: ModelConfig
    platform: PlatformConfig
    tokenizer: TokenizerConfig
    chat_template: str | None
    """data.chat_template of a run on conversations; None: a run on plain text, such as pretraining."""


def run_of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote `checkpoint`, if any: the nearest one above whose config.toml lies beside
    the checkpoint, or beside the folder `checkpoints` that it is in.
    """
    path = checkpoint.absolute()
    # A config.toml further up may be anything's: that of a project in which a converted checkpoint lies.
    return next(
        (
            folder
            for folder in (path, *path.parents)
            if (folder / "config.toml").is_file()
            and (folder in (path, path.parent) or (folder / "checkpoints").is_dir())
        ),
        None,
    )


def read_trained_model(folder: Path) -> TrainedModel:
    """Read the config.toml of a run; ConfigError when `folder` has none, or it is not one that a run wrote."""
    path = folder / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        data = tables.get("data", {})
        return TrainedModel(
            model=section_of_run(ModelConfig, tables.get("model", {})),
            platform=section_of_run(PlatformConfig, tables.get("platform", {})),
            tokenizer=section_of_run(TokenizerConfig, data.get("tokenizer", {})),
            chat_template=data.get("chat_template"),
        )
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Name the run_dir of a training."
        ) from None
    except (ValueError, AttributeError) as error:  # not TOML, other fields; a section that is no table
        raise ConfigError(
            f"{path} is damaged, or not written by a training: {' '.join(str(error).split())[:200]}. Copy it again "
            "from the run."
        ) from None


def load_matching_tokenizer(config: TokenizerConfig, model: ModelConfig, checkpoint: str | None) -> Tokenizer:
    """Load the tokenizer of a training that starts from a model.

    Args:
        config: The tokenizer, `data.tokenizer`.
        model: The model, whose vocabulary must hold all tokens.
        checkpoint: The checkpoint from which the training starts; None: there is none.

    Raises:
        DataError: when the vocabulary is too small, or the checkpoint was trained with another tokenizer.
    """
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"the tokenizer {config.path} has {tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{model.vocab_size}. Name the tokenizer that the model was trained with."
        )
    refuse_other_tokenizer(tokenizer, checkpoint)
    return tokenizer


def refuse_other_tokenizer(
    tokenizer: Tokenizer, checkpoint: str | None, field: str = "checkpoint.load"
) -> None:
    """Raise a DataError when the run that wrote `checkpoint`, which `field` names, used another tokenizer, whose ids
    mean other text.

    Nothing is known, and nothing refused, without a checkpoint, or when it was converted or its tokenizer is gone.
    """
    folder = run_of_checkpoint(Path(checkpoint)) if checkpoint else None
    if folder is None or not (folder / "checkpoints").is_dir():
        return
    trained_with = read_trained_model(folder).tokenizer
    if trained_with.path is None or not Path(trained_with.path).exists():
        return
    if load_tokenizer(trained_with).digest != tokenizer.digest:
        raise DataError(
            f"{field}={checkpoint} is of a run with the tokenizer {trained_with.path}, data.tokenizer.path "
            "names another: the model would read other tokens than it has learned. Name that one, or another "
            "checkpoint."
        )
