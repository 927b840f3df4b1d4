"""What the folder of a run says about the checkpoints in it."""

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
class Trained:
    """What the config.toml of a run of any kind says about its model."""

    model: ModelConfig
    platform: PlatformConfig
    tokenizer: TokenizerConfig


def run_above(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote `checkpoint`: the nearest above with a config.toml; None: it came otherwise."""
    above = (checkpoint.absolute(), *checkpoint.absolute().parents)
    return next((folder for folder in above if (folder / "config.toml").is_file()), None)


def run_of(checkpoint: Path) -> Path:
    """The same; ConfigError when there is none."""
    if (folder := run_above(checkpoint)) is not None:
        return folder
    raise ConfigError(
        f"--checkpoint {checkpoint}: there is no config.toml there or above, which says what model and tokenizer it "
        "is of. Name the folder of a run with the same: --run."
    )


def read_run(folder: Path) -> Trained:
    """The parts of `folder`/config.toml that runs of all kinds have."""
    path = folder / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Give --run the run_dir of a training."
        ) from None
    return Trained(
        model=section_of_run(ModelConfig, tables.get("model", {}), "model"),
        platform=section_of_run(PlatformConfig, tables.get("platform", {}), "platform"),
        tokenizer=section_of_run(
            TokenizerConfig, tables.get("data", {}).get("tokenizer", {}), "data.tokenizer"
        ),
    )


def refuse_other_tokenizer(tokenizer: Tokenizer, checkpoint: str | None) -> None:
    """Raise DataError when the run that wrote `checkpoint` used another tokenizer, whose ids mean other text.

    Nothing is known, and nothing refused, without a checkpoint, or when it was converted or its tokenizer is gone.
    """
    folder = run_above(Path(checkpoint)) if checkpoint else None
    if folder is None or not (folder / "checkpoints").is_dir():
        return
    theirs = read_run(folder).tokenizer
    if theirs.kind == "none" or not Path(theirs.path).exists():
        return
    if load_tokenizer(theirs).digest != tokenizer.digest:
        raise DataError(
            f"checkpoint.load={checkpoint} is of a run with the tokenizer {theirs.path}, data.tokenizer.path names "
            "another: the model would read other tokens than it has learned. Name that one, or another checkpoint."
        )
