"""A start in the folder of a finished run: the same run has nothing to do, and another run is refused."""

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.checks.inputs import contents_of_inputs, inputs_of
from mcore_rl.config.changes import ConfigChange, config_changes, listing, with_contents
from mcore_rl.config.kinds import kind_of_config
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.storage.checkpoint import complete_in, read_marker

COMPUTED = ("mesh.", "platform.")
"""Sections in which a start may differ from a finished run: they decide how it is computed, not what is trained."""


def refuse_other_run(run_dir: str, changes: Sequence[ConfigChange], allowed: tuple[str, ...]) -> None:
    """Raise a ConfigError if the finished run in `run_dir`, from which a config has `changes`, was trained otherwise,
    such as for fewer steps or with another loss; changes that are `allowed` do not count.
    """
    refused = [
        change
        for change in changes
        if not (change.is_moved or change.key.startswith(COMPUTED) or change.is_allowed(allowed))
    ]
    if refused:
        listed, keys = listing(refused)
        is_longer = any(change.key == "train.steps" and change.now > change.before for change in refused)
        go_on = f"Delete {run_dir}/DONE to train on to its train.steps, or choose" if is_longer else "Choose"
        raise ConfigError(
            f"{run_dir} has a finished run with other settings:\n{listed}\n{go_on} another run_dir for this one, or, "
            f"if that one is what you want, set them as they were or give checkpoint.allow_changes={keys}."
        )


def changes_since_done(config: RunConfig) -> list[ConfigChange]:
    """Return the fields that differ from the config of the finished run in `config.run_dir`, as far as its checkpoints
    still exist; CheckpointError if another program made it.
    """
    complete = complete_in(Path(config.run_dir) / "checkpoints")
    marker = read_marker(complete[-1]) if complete else None
    if marker is None or not marker.program:
        return []
    if marker.program != (kind := kind_of_config(config)):
        raise CheckpointError(
            f"{config.run_dir} has a finished run of {marker.program}, and this is {kind}. Choose another run_dir."
        )
    inputs = contents_of_inputs(inputs_of(config))
    return with_contents(config_changes(marker.settings, config), marker.inputs, inputs)
