"""Reading the pickles of a checkpoint without running programs, in place of torch's and Megatron's own readers.

A checkpoint is checked before it is loaded (`mcore_rl.storage.checkpoints.read`). These readers make sure that
nothing is run even if the check and torch disagree on a file's content, or the file changes in between.
"""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed.checkpoint._traverse import set_element

from mcore_rl.errors import CheckpointError
from mcore_rl.storage.foreign.pickles import load_saved, refuse_programs_inside, unpickle_metadata

COMMON = "common.pt"


def load_entry(self: Any, read_item: Any, value: io.BytesIO) -> None:
    """`DefaultLoadPlanner.load_bytes`: put an object that is no tensor into the planner's state.

    Raises:
        CheckpointError: If the object asks for a program; the message names its key and file.
    """
    name = read_item.dest_index.fqn
    stored = self.metadata.storage_data if self.metadata is not None else {}
    info = (stored or {}).get(read_item.storage_index)
    what = f"{name} in {info.relative_path}" if info is not None else name
    loaded = load_saved(value.getvalue(), what)
    if "_extra_state" in name:
        refuse_programs_inside(loaded, what)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def restricted_pickle(module: Any) -> Any:
    """Return the part of `pickle` that torch's reader and writer of `.metadata` use, with a load that runs no
    programs.
    """

    def load(file: Any) -> Any:
        try:
            return unpickle_metadata(file)
        except CheckpointError as error:
            raise CheckpointError(f"{file.name}: {error}.") from None

    return SimpleNamespace(**vars(module) | {"load": load})


def load_common_method(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`TorchCommonLoadStrategy.load_common` of 0.16; a missing file is left to Megatron, which names it."""
    return lambda self, folder: _load_common(folder, lambda: load(self, folder))


def load_common_function(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`load_common` of 0.19; a missing file is left to Megatron, which names it."""
    return lambda checkpoint_dir: _load_common(checkpoint_dir, lambda: load(checkpoint_dir))


def _load_common(folder: Any, otherwise: Callable[[], Any]) -> Any:
    file = Path(folder) / COMMON
    return load_saved(file.read_bytes(), str(file), "cpu") if file.is_file() else otherwise()
