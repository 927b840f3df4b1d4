"""Folders that hold models: Hugging Face's, checkpoints, runs and imports, and their own descriptions of the model."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.extension import is_extension
from mcore_rl.config.load import section_of_run
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import family_of, model_from_hf
from mcore_rl.families.config_json import num_mtp_layers
from mcore_rl.families.shells import text_config
from mcore_rl.storage import files
from mcore_rl.storage.checkpoint import MARKER, Marker, find_checkpoint, path_of_step, read_marker

NOT_JSON = (ValueError, RecursionError, MemoryError)
"""Exceptions that parsing JSON raises; the last two on crafted texts."""
READ_JSON = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""JSON files of a folder that are read; any other may be what it likes."""
VOCABULARIES = ("vocab.json", "merges.txt")
NO_TEMPLATE = (
    "{folder} has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json). Name a "
    'jinja file with data.chat_template, or set it to "plain" or "raw".'
)


def is_hf(path: Path) -> bool:
    """Return whether a path is of Hugging Face's format: a safetensors file, or a folder that has some."""
    return path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors*")))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError if it cannot be read, or an object has a key twice."""
    refuse_special_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(once_each, path))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Let this user read it, or take another copy."
        ) from error
    except NOT_JSON as error:
        remedy = files.POINTER_REMEDY if files.is_lfs_pointer(path) else "Take another copy."
        raise CheckpointError(f"{path} is not JSON: {error or 'too large'}. {remedy}") from error


def once_each(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file. Raises CheckpointError if it has a key twice, of which programs take either."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CheckpointError(
                f"{path} has {key} twice in one object, as {str(found[key])[:50]} and as {str(value)[:50]}: which of "
                "them counts depends on the program that reads it. Keep the one that belongs to the weights."
            )
        found[key] = value
    return found


def refuse_special_file(path: Path) -> None:
    """Raise CheckpointError for a pipe or device, which could be read forever; a path that does not exist passes."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no regular file, but a folder, pipe or device. Put the file itself there.")


def refuse_cut_off(file: Path) -> None:
    """Raise CheckpointError for a file that is read with a model and is empty, or begins JSON that does not end."""
    if file.name in READ_JSON:
        read_json(file)
    elif (file.suffix in (".jinja", ".model") or file.name in VOCABULARIES) and not file.stat().st_size:
        raise CheckpointError(f"{file} is empty. Download or copy it again.")


def snapshot_in(folder: Path) -> Path | None:
    """Return the main branch's or only snapshot in a hub cache's `models--...`; None if there is no such one."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir() or (folder / "config.json").exists():
        return None
    main = folder / "refs/main"
    named = snapshots / main.read_text(encoding="utf-8").strip() if main.is_file() else None
    there = list(snapshots.iterdir())
    return named if named in there else there[0] if len(there) == 1 else None


def hub_cache_fault(folder: Path) -> str | None:
    """Return the fault of a folder of the hub's cache that has its files further down; None for any other folder."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir() or (folder / "config.json").exists():
        return None
    there = sorted(str(path) for path in snapshots.iterdir())
    name = there[0] if len(there) == 1 else f"a folder in {snapshots}"
    return f"{folder} is a folder of the Hugging Face cache, whose files are in snapshots: name {name}"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder. Raises CheckpointError if it is missing or not a JSON object."""
    if (fault := hub_cache_fault(folder)) is not None:
        raise CheckpointError(f"{fault}.")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder}/config.json is no JSON object. Take the config.json that belongs to the weights."
        )
    return config


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
    is_huggingface: bool = False
    """Whether the weights are Hugging Face's, which are imported before they are loaded."""
    data: tuple[str, ...] = ()
    """Prefixes of the data that the run was pretrained on."""
    has_training_state: bool = False
    """Whether a training run wrote it, possibly with optimizer state; otherwise it has only weights."""


def cached_or_given(path: Path) -> Path:
    """Return the path, or the folder in the hub's cache of a model of that name; ConfigError if there is neither."""
    return path if path.exists() or not HUB_NAME.fullmatch(str(path)) else find_model(str(path), "PATH")


def find_model(name: str, field: str = "model.path") -> Path:
    """Return the folder of `field`: a path, or a model in the hub's local cache; ConfigError for neither."""
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
    """Return the model in the folder of a run, checkpoint, import or Hugging Face's; an McoreRlError if none."""
    if (path / "config.toml").is_file():
        return read_run(path)
    files.refuse_absent_content(path)
    if (path / "config.json").is_file() and not (path / MARKER).exists():
        return ModelFolder(
            path=path,
            model=model_from_hf(read_config(path), family),
            tokenizer=tokenizer_in(path),
            chat_template=template_in(path),
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
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Name the run_dir of a training.") from None
    except (ValueError, AttributeError) as error:  # not TOML, other fields; a section that is no table
        raise ConfigError(
            f"{path} is damaged, or not written by a training: {' '.join(str(error).split())[:200]}. Copy it again "
            "from the run."
        ) from None


def run_of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote `checkpoint`: the nearest above it with a config.toml."""
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
    """Return the section `lora` of the run of a checkpoint, or of the newest in a folder."""
    path = find_checkpoint(checkpoint)
    return lora_of(read_marker(path) if (path / MARKER).is_file() else None)


def tokenizer_in(folder: Path) -> TokenizerConfig:
    """Return the tokenizer of the files in a folder; kind "none" if there is none."""
    for name, kind in TOKENIZERS:
        if (folder / name).is_file():
            path = folder if kind == "huggingface" else folder / name
            return TokenizerConfig.model_validate({"kind": kind, "path": str(path)})
    return TokenizerConfig()


def template_in(folder: Path) -> Literal["tokenizer"] | None:
    """Return data.chat_template of a tokenizer's folder that has a template; else None."""
    if (folder / "chat_template.jinja").is_file():
        return "tokenizer"
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    return "tokenizer" if isinstance(settings, dict) and settings.get("chat_template") else None


def _read_checkpoint(path: Path) -> ModelFolder:
    """Describe a checkpoint by its run if it is in a run's folder, else by its marker and files."""
    if (run := run_of_checkpoint(path)) is not None:
        return read_run(run)
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of Megatron-LM, which does not name its model. Set the section [model], and name "
            "it in checkpoint.load."
        )
    marker = read_marker(path)
    data: dict[str, Any] = marker.settings.get("data", {})
    tokenizer, template = tokenizer_in(path), template_in(path)
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


CACHE_VARIABLE = "MCORE_RL_CACHE"
IMPORTS = "imports"
"""Folder of imports next to a run, or in the user's cache."""
DIGITS = 16
"""Hexadecimal digits of a key in the name of an import."""


class ModelImport:
    """An import of a Hugging Face folder: where it is, and the words after `mcore-rl` that make it."""

    def __init__(self, source: Path, model: ModelConfig, imports: Path) -> None:
        """Find the import of `source` in `imports`; CheckpointError without weights or config.json."""
        own_family = model.family if is_extension(model.family) else None
        options = []
        if own_family is not None:
            options += ["--family", own_family]
        if model.vocab_multiple != type(model)().vocab_multiple:
            options += ["--vocab-multiple", str(model.vocab_multiple)]
        # A config.json may not count the layer that such a family's folder has.
        may_have_mtp = num_mtp_layers(text_config(read_config(source))) or family_of(model).mtp_prefix
        if model.mtp_layers == 0 and may_have_mtp:
            options += ["--mtp", "drop"]
        weights = files.sizes_and_times(sorted(source.glob("*.safetensors*")))
        if not any(path.suffix == ".safetensors" for path in weights):
            raise CheckpointError(
                f"{source} has no *.safetensors, only an index. Download the folder again."
                f"{files.unfinished_download(source)}"
            )
        identity = [read_config(source), options, sorted((path.name, stamp) for path, stamp in weights.items())]
        key = sha256(repr(identity).encode()).hexdigest()[:DIGITS]
        whole = source.absolute()
        is_in_cache = whole.parent.name == "snapshots"
        name = whole.parent.parent.name.removeprefix("models--") if is_in_cache else whole.name
        self.path = imports / f"{name}-{key}"
        """Folder that has, or will have, the checkpoint."""
        self.command = ["convert", "import", str(source), str(self.path), *options]

    @property
    def is_complete(self) -> bool:
        """Whether the import has been made."""
        return (path_of_step(self.path, 0) / MARKER).is_file()


def import_of(load: str, model: ModelConfig, imports: Path) -> ModelImport | None:
    """Return the import of `load` (of `checkpoint.load`) in the folder `imports`; None if that is a checkpoint."""
    if not Path(load).is_dir():
        return None
    source = find_model(load, "checkpoint.load")  # the snapshot, of a model in the hub's cache
    return ModelImport(source, model, imports) if is_hf(source) else None


def imports_folder(environment: Mapping[str, str], run_dir: Path | None) -> Path:
    """Return the folder of imports: MCORE_RL_CACHE, else `imports` next to a run, else in the user's cache."""
    if named := environment.get(CACHE_VARIABLE):
        return Path(named)
    if run_dir is not None:
        return run_dir.parent / IMPORTS
    cache = Path(environment.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "mcore_rl" / IMPORTS
