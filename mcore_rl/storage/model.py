"""A folder's own description of its model: Hugging Face's config.json, a run's config.toml, or the marker of a
checkpoint, written by an import or by training.
"""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.load import section_of_run
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import model_from_hf
from mcore_rl.storage.checkpoint import MARKER, Marker, find_checkpoint, read_marker
from mcore_rl.storage.huggingface import (
    is_hf,
    read_config,
    read_json,
    refuse_dangling_links,
    snapshot_in,
)

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""A model of the Hugging Face hub, as `Qwen/Qwen3-30B-A3B`."""
TOKENIZERS = (("tokenizer.json", "huggingface"), ("tokenizer.model", "sentencepiece"))
"""Tokenizer files and the kind that reads them; the first existing file counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """Settings that a folder has for its model."""

    path: Path
    """The folder that was read: of a model in the hub's cache its snapshot, of a folder of checkpoints the newest."""
    model: ModelConfig
    tokenizer: TokenizerConfig
    """Tokenizer of the model; kind "none" where the folder has none."""
    chat_template: str | None = None
    """Template of the model's chats, as `data.chat_template`: the run's or the tokenizer's; None without a template."""
    platform: PlatformConfig = field(default_factory=PlatformConfig)
    """Section `platform` of the run."""
    is_huggingface: bool = False
    """Whether the weights are Hugging Face's, which are imported before they are loaded."""
    data: tuple[str, ...] = ()
    """Prefixes of the data that the run was pretrained on."""
    has_training_state: bool = False
    """Whether a training run wrote it, possibly with optimizer state; otherwise it has only weights."""


def cached_or_given(path: Path) -> Path:
    """Return the path that a command is given, or the folder in the hub's cache of a model that it names so.

    Raises:
        ConfigError: There is nothing at a path that could be a name of the hub, and no such model in the cache.
    """
    return path if path.exists() or not HUB_NAME.fullmatch(str(path)) else find_model(str(path), "PATH")


def find_model(name: str, field: str = "model.path") -> Path:
    """Return the folder that `field` names: a path, or a model of the hub in its local cache.

    Raises:
        ConfigError: There is no such folder, and no such model in the cache.
    """
    path = Path(name)
    if path.is_dir():
        return snapshot_in(path) or path
    if path.exists():
        raise ConfigError(f"{field}={name} is a file. Name the folder that it is in.")
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{field}={name} does not exist. Name a Hugging Face folder, an import, a checkpoint, the run_dir of a "
            "training, or a model of the hub as ORGANIZATION/NAME."
        )
    # Its import takes as long as all else that a config needs.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise ConfigError(
            f"{field}={name} is no folder, and the hub's cache on this machine has no model of that name. Download it: "
            f"`hf download {name}` (a gated model needs `hf auth login` first); on a machine without a network, copy a "
            "folder that has its config.json, tokenizer and safetensors, and name that."
        )
    return Path(found).parent


def read_model_folder(path: Path, family: str | None = None) -> ModelFolder:
    """Return the description of the model in the folder of a run, a checkpoint, an import or a Hugging Face model.

    Args:
        path: The folder; of a folder of checkpoints, or a run, the newest checkpoint counts.
        family: A family of the user's own for a Hugging Face folder, as `module:name`; None for its config.json's.

    Raises:
        CheckpointError, ConfigError: The folder describes no model, or a model that Megatron cannot build.
    """
    if (path / "config.toml").is_file():
        return read_run(path)
    refuse_dangling_links(path)
    if (path / "config.json").is_file() and not (path / MARKER).exists():
        return ModelFolder(
            path=path,
            model=model_from_hf(read_config(path), family),
            tokenizer=tokenizer_in(path),
            chat_template=_template_in(path),
            is_huggingface=True,
        )
    if is_hf(path):
        raise CheckpointError(f"{path} has weights and no config.json. Take the one that belongs to them.")
    return _read_checkpoint(find_checkpoint(path))


def read_run(folder: Path) -> ModelFolder:
    """Read the config.toml of a run; ConfigError when `folder` has none, or no run wrote it."""
    path = folder / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        data = tables.get("data", {})
        return ModelFolder(
            path=folder,
            model=section_of_run(ModelConfig, tables.get("model", {})),
            platform=section_of_run(PlatformConfig, tables.get("platform", {})),
            tokenizer=section_of_run(TokenizerConfig, data.get("tokenizer", {})),
            chat_template=data.get("chat_template"),
            data=tuple(data.get("train", ())),
            has_training_state=True,
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


def run_of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote `checkpoint`, if any: the nearest folder above it with a config.toml next
    to the checkpoint, or next to the folder `checkpoints` that it is in.
    """
    path = checkpoint.absolute()
    # A config.toml further up may be unrelated, such as a project's that contains a converted checkpoint.
    return next(
        (
            folder
            for folder in (path, *path.parents)
            if (folder / "config.toml").is_file()
            and (folder in (path, path.parent) or (folder / "checkpoints").is_dir())
        ),
        None,
    )


def lora_of(marker: Marker | None) -> LoraConfig:
    """Return the section `lora` of the run that wrote a checkpoint with this marker; off if no run wrote it."""
    return section_of_run(LoraConfig, {} if marker is None else marker.settings.get("lora", {}))


def stored_lora(checkpoint: Path) -> LoraConfig:
    """Return the section `lora` of the run that wrote a checkpoint; for a run or a folder of checkpoints, of the newest
    checkpoint.
    """
    path = find_checkpoint(checkpoint)
    return lora_of(read_marker(path) if (path / MARKER).is_file() else None)


def tokenizer_in(folder: Path) -> TokenizerConfig:
    """Return the tokenizer of the files in a folder; kind "none" if there is none."""
    for name, kind in TOKENIZERS:
        if (folder / name).is_file():
            path = folder if kind == "huggingface" else folder / name
            return TokenizerConfig.model_validate({"kind": kind, "path": str(path)})
    return TokenizerConfig()


def _template_in(folder: Path) -> Literal["tokenizer"] | None:
    """Return the word for the template of the tokenizer in a folder; None where the tokenizer has none."""
    if (folder / "chat_template.jinja").is_file():
        return "tokenizer"
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    return "tokenizer" if isinstance(settings, dict) and settings.get("chat_template") else None


def _read_checkpoint(path: Path) -> ModelFolder:
    """Return a checkpoint's description: from its run if it is in a run's folder, else from its marker and the files
    next to it.
    """
    if (run := run_of_checkpoint(path)) is not None:
        return read_run(run)
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of Megatron-LM, which does not name its model. Set the section [model], and name "
            "it in checkpoint.load."
        )
    marker = read_marker(path)
    data: dict[str, Any] = marker.settings.get("data", {})
    tokenizer, template = tokenizer_in(path), _template_in(path)
    if tokenizer.path is None:
        tokenizer = section_of_run(TokenizerConfig, data.get("tokenizer", {}))
        template = data.get("chat_template")
    return ModelFolder(
        path=path,
        model=section_of_run(ModelConfig, marker.model),
        tokenizer=tokenizer,
        chat_template=template,
        has_training_state=bool(marker.program),
    )
