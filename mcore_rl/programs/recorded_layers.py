"""The layers that a run on a CPU was started with, and that resumed runs use."""

from functools import partial

from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import DataError
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.attempts_file import FILE_NAME, read_attempts
from mcore_rl.train.run_folder import RunFolder


def keep_layers(
    config: PlatformConfig, platform: Platform, folder: RunFolder
) -> tuple[Platform, tuple[str, ...]]:
    """Collective over the world: use the layers that the last start of a run recorded, before a model is built.

    A run with torch's layers keeps them if `platform.layers` is "auto".

    Returns:
        The platform with the layers of this start, and warnings: if the order of sums differs from the last start, so
        that the run does not continue bit for bit, and if run.json was damaged, which is then renamed.
    """
    recorded, damage = on_rank_zero(partial(_last_layers, folder))
    if (
        recorded == "torch"
        and platform.layers == "cpu"
        and config.layers == "auto"
        and not config.bf16_products
    ):
        platform = platform.with_torch_layers(f"as in {FILE_NAME}")
    if not recorded or recorded == platform.layers_id:
        return platform, damage
    return platform, (
        *damage,
        f'{FILE_NAME} has the layers "{recorded}", and this start computes with "{platform.layers_id}": the run is '
        "not continued bit for bit. For that, resume on a machine like the first, with the same platform.layers",
    )


def _last_layers(folder: RunFolder) -> tuple[str, tuple[str, ...]]:
    """Return the layers of the last start ("" if not recorded), and a sentence if the record is damaged."""
    try:
        return next((attempt.layers for attempt in read_attempts(folder.path)[::-1]), ""), ()
    except DataError:
        aside = folder.set_aside(FILE_NAME)
        return "", (
            f"{folder.path / FILE_NAME} was damaged, and is {aside.name} now: the report knows nothing of the starts "
            "before, and a run on a CPU chooses its layers anew",
        )
