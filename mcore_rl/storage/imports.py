"""The place of a Hugging Face folder's import: weights are imported once, and every run and mesh loads that import."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from mcore_rl.config.extension import is_extension
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_of
from mcore_rl.families.hf_config import num_mtp_layers
from mcore_rl.families.shells import text_config
from mcore_rl.storage.checkpoint import MARKER, path_of_step
from mcore_rl.storage.files import sizes_and_times
from mcore_rl.storage.huggingface import is_hf, read_config, unfinished_download
from mcore_rl.storage.model import find_model

CACHE_VARIABLE = "MCORE_RL_CACHE"
"""Environment variable with the folder of all imports."""
IMPORTS = "imports"
"""Folder of imports next to a run, or in the user's cache."""
DIGITS = 16
"""Hexadecimal digits of a key in the name of an import."""


class ModelImport:
    """An import of a Hugging Face folder: where it is, and the words after `mcore-rl` that make it."""

    def __init__(self, source: Path, model: ModelConfig, imports: Path) -> None:
        """Find the import of `source` for `model`, in the folder `imports`.

        Raises:
            CheckpointError: The folder has no weights, or its config.json cannot be read.
        """
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
        identity = [read_config(source), options, sorted(_identity(source).items())]
        key = sha256(repr(identity).encode()).hexdigest()[:DIGITS]
        self.path = imports / f"{_name(source)}-{key}"
        """Folder that has, or will have, the checkpoint."""
        self.command = ["convert", "import", str(source), str(self.path), *options]

    @property
    def is_complete(self) -> bool:
        """Whether the import has been made."""
        return (path_of_step(self.path, 0) / MARKER).is_file()


def import_of(load: str, model: ModelConfig, imports: Path) -> ModelImport | None:
    """Return the import of the weights `load`; None if they are already a checkpoint.

    Args:
        load: A value of `checkpoint.load`.
        model: The model that loads them.
        imports: The folder of imports, as `imports_folder` returns it.
    """
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


def _identity(source: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file with weights."""
    found = sizes_and_times(sorted(source.glob("*.safetensors*")))
    if not any(path.suffix == ".safetensors" for path in found):
        raise CheckpointError(
            f"{source} has no *.safetensors, only an index. Download the folder again.{unfinished_download(source)}"
        )
    return {path.name: stamp for path, stamp in found.items()}


def _name(source: Path) -> str:
    """Return the name of a folder's import, of a snapshot in the hub's cache by the model's name."""
    path = source.absolute()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--")
    return path.name
