"""The config of a training, completed from the folder of its model."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl.config.changes import leaves, listing
from mcore_rl.config.describe import describe
from mcore_rl.config.extension import is_extension
from mcore_rl.config.load import Setting, config_of, read_settings, refusal
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section
from mcore_rl.errors import CheckpointError, ConfigError, McoreRlError
from mcore_rl.families.same_model import model_changes
from mcore_rl.storage.folders import ModelFolder, find_model, is_hf, read_model_folder

R = TypeVar("R", bound=RunConfig)
MISSED = {"extends=": r"- |.* is not set;", "model.path": r"- .*(?:model\.|tokenizer|template)"}
"""Beginning of a wrong setting -> messages about other settings that it causes; those of checks begin with a dash."""
OF_TRAINING = (
    *("model.path", "model.head", "model.attention_dropout", "model.hidden_dropout", "model.mtp_loss_coeff"),
    *("model.moe.balance", "model.moe.aux_loss_coeff", "model.moe.expert_bias_rate", "model.moe.z_loss_coeff"),
    *("model.moe.capacity_factor", "model.moe.dispatcher"),
)
"""Fields of `model` about training, which keep the value set in a weaker place, such as a recipe."""
REPLACED = ("checkpoint.load", "data.tokenizer", "data.chat_template")
"""Beginnings of fields in weaker places that a model's folder replaces."""
NOT_TAKEN = ("model.path", "model.head")
"""Fields of `model` that no folder decides."""
OF_SHAPE = (
    *("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"),
    *("qkv_bias", "qk_norm", "tied_embeddings", "mla"),
    *("moe.num_experts", "moe.ffn_hidden_size", "moe.shared_experts", "moe.shared_ffn_hidden_size"),
    *("moe.first_dense_layers", "moe.expert_bias"),
)
"""Fields and sections of `model` that decide names and shapes of the weights: with other values these weights do not
load.
"""


def load_run_config(
    cls: type[R], path: Path | None, overrides: Sequence[str] = (), check: Callable[[R, bool], None] | None = None
) -> R:
    """Read the config of a training as `load_config` does, with defaults from the folder of its model.

    `model.path` gives the section `model`, the tokenizer, the chat template of a run, and the weights; without it
    `checkpoint.load` gives all but the weights, where it is there and describes its model.

    `check` gets the config, without the settings that are wrong, and whether there are any; it raises what else is.

    Raises:
        McoreRlError: Everything wrong with the settings, each for itself: files that are extended and missing, unknown
            keys, a model that cannot be read, values of a wrong type, and fields that contradict the model's weights.
    """
    wrong: set[str] = set()
    errors: list[McoreRlError] = []
    lines: list[str] = []
    while True:
        try:
            config = with_origins(cls, path, overrides, wrong)[0]
            if check is not None:
                check(config, bool(errors))
            if not errors:
                return config
            break
        except McoreRlError as error:
            found = meaningful(str(error).splitlines(), wrong)
            if found or not errors:
                errors.append(error)
            lines += found
            if wrong.issuperset(error.keys):
                break
            wrong.update(error.keys)
    raise errors[0] if len(errors) == 1 else refusal(lines, wrong)


def meaningful(lines: Iterable[str], wrong: Collection[str]) -> list[str]:
    """Return the lines of messages about a config without the settings `wrong`, but for those that only their absence
    causes: a default in the place of a wrong value would mislead.
    """
    hidden = [rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in wrong]
    hidden += [rf"^(?:{pattern})" for key, pattern in MISSED.items() if any(name.startswith(key) for name in wrong)]
    return [line for line in lines if not any(re.search(pattern, line) for pattern in hidden)]


def with_origins(
    cls: type[R], path: Path | None, overrides: Sequence[str] = (), without: Collection[str] = ()
) -> tuple[R, dict[str, str]]:
    """Return the config as `load_run_config` does, and for each field that is set where it was."""
    settings = read_settings(cls, path, overrides, without)
    try:
        folder, named = _folder(settings)
    except (ConfigError, CheckpointError) as error:
        named = settings["model.path" if "model.path" in settings else "checkpoint.load"]
        # What the model would replace is no mistake.
        weaker = {key for key in settings if key.startswith(REPLACED) and settings[key].rank < named.rank}
        error.keys = weaker | {named.key}
        raise
    takes_weights = False
    if folder is not None and named is not None:
        own = _without_weaker(settings, folder, named)
        takes_weights = named.key == "model.path" and "checkpoint.load" not in own
        settings = {**_defaults(cls, own, folder, named), **own}
    config = config_of(cls, settings)
    if folder is not None and takes_weights:
        _refuse_contradictions(config.model, config.checkpoint.allow_changes, folder, settings)
    return config, {key: setting.source for key, setting in settings.items()}


def _folder(settings: Mapping[str, Setting]) -> tuple[ModelFolder | None, Setting | None]:
    """Return the model's folder, and its field: `model.path`, else `checkpoint.load` with a model in it."""
    family = _text(settings, "model.family")
    own = family if family and is_extension(family) else None
    if (name := _text(settings, "model.path")) is not None:
        return read_model_folder(find_model(name), own), settings["model.path"]
    if (name := _text(settings, "checkpoint.load")) is None or not Path(name).is_dir():
        return None, None
    path = find_model(name, "checkpoint.load")
    try:
        return read_model_folder(path, own), settings["checkpoint.load"]
    except (ConfigError, CheckpointError):
        # It is loaded later, and refused there with its own reason; until then [model] may describe the model.
        if is_hf(path):
            raise
        return None, None


def _without_weaker(settings: Mapping[str, Setting], folder: ModelFolder, named: Setting) -> dict[str, Setting]:
    def is_weaker(key: str, setting: Setting) -> bool:
        if setting.rank >= named.rank:
            return False
        if key.startswith("data.tokenizer"):
            return has_tokenizer and not is_same
        if key == "data.chat_template":
            return has_tokenizer and folder.chat_template is not None
        if key in ("checkpoint.load", "checkpoint.load_optimizer"):
            return named.key == "model.path"
        return key.startswith("model.") and key not in OF_TRAINING

    # Kind and path of a tokenizer belong together: a kind is kept with a path that is set in a stronger place.
    own = any(key.startswith("data.tokenizer") and s.rank >= named.rank for key, s in settings.items())
    has_tokenizer = folder.tokenizer.kind != "none" and not own
    # A run is known by the words of its config: a path of the same file stays as it is written.
    is_same = _is_same(_text(settings, "data.tokenizer.path"), folder.tokenizer.path)
    return {key: setting for key, setting in settings.items() if not is_weaker(key, setting)}


def _defaults(
    cls: type[Section], settings: Mapping[str, Setting], folder: ModelFolder, named: Setting
) -> dict[str, Setting]:
    fields = {doc.key for doc in describe(cls)}
    found = {key: value for key, value in leaves(folder.model, "model.") if key not in NOT_TAKEN}
    is_set = any(key.startswith("data.tokenizer") for key in settings)
    if folder.tokenizer.kind != "none" and not is_set:
        found |= dict(leaves(folder.tokenizer, "data.tokenizer."))
    is_folders = not is_set or _is_same(_text(settings, "data.tokenizer.path"), folder.tokenizer.path)
    if folder.chat_template is not None and is_folders:
        found["data.chat_template"] = folder.chat_template
    is_load = named.key == "model.path" and "checkpoint.load" not in settings
    if is_load:
        # A name of the hub as the folder that it is in the cache, for everything that looks for a file.
        found["checkpoint.load"] = str(folder.path) if folder.is_huggingface else named.value
    if is_load or not folder.has_training_state:
        found["checkpoint.load_optimizer"] = False
    return {
        key: Setting(key, "none" if value is None else value, folder.path, named.rank)
        for key, value in found.items()
        if key in fields
    }


def _refuse_contradictions(
    model: ModelConfig, allowed: tuple[str, ...], folder: ModelFolder, settings: Mapping[str, Setting]
) -> None:
    changes = model_changes(folder.model.model_dump(mode="json"), model)
    of_shape = tuple(f"model.{name}" for name in OF_SHAPE)
    refused = [change for change in changes if change.is_allowed(of_shape) or not change.is_allowed(allowed)]
    if not refused:
        return
    listed, _ = listing(refused)
    loadable = [change for change in refused if not change.is_allowed(of_shape)]
    accept = ""
    if loadable:
        accept = (
            " Fields by which the weights load and compute something else can be accepted: "
            f"checkpoint.allow_changes={listing(loadable)[1]}."
        )
    places = dict.fromkeys(settings[change.key].source for change in refused if change.key in settings)
    message = (
        f"model.path={model.path} has weights of another model than is set {' and '.join(places)}:\n{listed}\n"
        "Leave these fields out; or, for random weights of the model that they describe, set checkpoint.load=none."
        f"{accept}"
    )
    raise refusal([message], {change.key for change in refused} & settings.keys())


def _is_same(one: str | None, other: str | None) -> bool:
    if one is None or other is None or not (Path(one).exists() and Path(other).exists()):
        return False
    return Path(one).samefile(other)


def _text(settings: Mapping[str, Setting], key: str) -> str | None:
    value: Any = settings[key].value if key in settings else None
    return value if isinstance(value, str) and value != "none" else None
