"""A start in the folder of a finished run: the same run has nothing to do, and another run is refused."""

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.checks.inputs import contents_of_inputs, inputs_of
from mcore_rl.config.changes import ConfigChange, config_changes, listing, with_contents
from mcore_rl.config.kinds import kind_of_config
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.storage.checkpoint import complete_in, read_marker


def refuse_other_run(run_dir: str, changes: Sequence[ConfigChange], allowed: tuple[str, ...]) -> None:
    """Raise a ConfigError if the finished run in `run_dir`, from which a config has `changes`, had another model, or
    used other data or random numbers, except those that are `allowed`.
    """
    refused = [
        change
        for change in changes
        if (change.breaks_exactness or change.key.startswith("model.")) and not change.is_allowed(allowed)
    ]
    if refused:
        listed, keys = listing(refused)
        raise ConfigError(
            f"{run_dir} has a finished run, which is another one:\n{listed}\nChoose another run_dir for this "
            f"one, or, if that one is what you want, set them as they were or give checkpoint.allow_changes={keys}."
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
