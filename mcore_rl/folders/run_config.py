"""The config of a training, with what it leaves out taken from the folder of its model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl.config.changes import leaves, listing
from mcore_rl.config.describe import describe
from mcore_rl.config.extension import is_extension
from mcore_rl.config.load import Setting, config_of, read_settings
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families.same_model import model_changes
from mcore_rl.folders.huggingface import is_hf
from mcore_rl.folders.model import ModelFolder, find_model, read_model_folder

R = TypeVar("R", bound=RunConfig)
NOT_TAKEN = ("model.path", "model.head")
"""Fields of `model` that are of the program, not of the model in a folder."""


def load_run_config(cls: type[R], path: Path | None, overrides: Sequence[str] = ()) -> R:
    """Read the config of a training as `load_config` does, with defaults from the folder of its model.

    `model.path` gives the section `model`, the tokenizer, the chat template of a run, and the weights; without it
    `checkpoint.load` gives all but the weights, where it is there and says what its model is.

    Raises:
        ConfigError: As of `load_config`; `model.path` is no model, or fields contradict the weights in it.
        CheckpointError: A file of `model.path` cannot be read.
    """
    return with_origins(cls, path, overrides)[0]


def with_origins(cls: type[R], path: Path | None, overrides: Sequence[str] = ()) -> tuple[R, dict[str, str]]:
    """Return the config as `load_run_config` does, and for each field that is set where it was."""
    settings = read_settings(cls, path, overrides)
    folder = _folder(settings)
    if folder is not None:
        settings = {**_defaults(cls, settings, folder), **settings}
    config = config_of(cls, settings)
    if folder is not None and config.checkpoint.load and config.checkpoint.load == config.model.path:
        _refuse_contradictions(config, folder, settings)
    return config, {key: setting.source for key, setting in settings.items()}


def _folder(settings: Mapping[str, Setting]) -> ModelFolder | None:
    """Return the folder of the model: `model.path`, else `checkpoint.load` where it describes a model."""
    family = _text(settings, "model.family")
    own = family if family and is_extension(family) else None
    if (named := _text(settings, "model.path")) is not None:
        return read_model_folder(find_model(named), own)
    if (named := _text(settings, "checkpoint.load")) is None or not Path(named).is_dir():
        return None
    path = find_model(named, "checkpoint.load")
    try:
        return read_model_folder(path, own)
    except (ConfigError, CheckpointError):
        # It is loaded later, and refused there with its own reason; until then [model] may describe the model.
        if is_hf(path):
            raise
        return None


def _defaults(
    cls: type[RunConfig], settings: Mapping[str, Setting], folder: ModelFolder
) -> dict[str, Setting]:
    """Return the settings that the folder has, for the fields of `cls`."""
    fields = {doc.key for doc in describe(cls)}
    found = {key: value for key, value in leaves(folder.model, "model.") if key not in NOT_TAKEN}
    if folder.tokenizer.kind != "none" and not any(key.startswith("data.tokenizer") for key in settings):
        found |= dict(leaves(folder.tokenizer, "data.tokenizer."))
    if folder.chat_template is not None:
        found["data.chat_template"] = folder.chat_template
    if (named := _text(settings, "model.path")) is not None and "checkpoint.load" not in settings:
        found["checkpoint.load"] = named
        found["checkpoint.load_optimizer"] = False
    elif not folder.has_training_state:
        found["checkpoint.load_optimizer"] = False
    return {
        key: Setting(key, "none" if value is None else value, folder.path)
        for key, value in found.items()
        if key in fields
    }


def _refuse_contradictions(config: RunConfig, folder: ModelFolder, settings: Mapping[str, Setting]) -> None:
    """Raise a ConfigError where the config's model is not the one that the weights of `model.path` are of."""
    changes = model_changes(folder.model.model_dump(mode="json"), config.model)
    refused = [change for change in changes if not change.is_allowed(config.checkpoint.allow_changes)]
    if not refused:
        return
    listed, keys = listing(refused)
    places = dict.fromkeys(settings[change.key].source for change in refused if change.key in settings)
    raise ConfigError(
        f"model.path={config.model.path} has weights of another model than is set {' and '.join(places)}:\n{listed}\n"
        "Leave these fields out; or, for random weights of the model that they describe, set checkpoint.load=none. "
        f"Fields by which the same weights compute something else are accepted with checkpoint.allow_changes={keys}."
    )


def _text(settings: Mapping[str, Setting], key: str) -> str | None:
    """Return the text that a field is set to; None: it is not set, or to "none"."""
    value: Any = settings[key].value if key in settings else None
    return value if isinstance(value, str) and value != "none" else None
