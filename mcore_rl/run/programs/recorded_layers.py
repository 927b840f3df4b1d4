"""The layers that a run on a CPU was started with, which its resumes use."""

from mcore_rl.backend.platform import Platform
from mcore_rl.config.run import PlatformConfig
from mcore_rl.obs.attempts_file import FILE_NAME, read_attempts
from mcore_rl.parallel.agree import on_rank_zero
from mcore_rl.train.run_folder import RunFolder


def keep_layers(
    config: PlatformConfig, platform: Platform, folder: RunFolder
) -> tuple[Platform, tuple[str, ...]]:
    """Collective over the world: take the layers that the last start of a run has recorded, before a model is built.

    A run of torch's layers goes on with them where `platform.layers` is "auto".

    Returns:
        The platform with the layers of this start, and a warning where sums have another order than in the last one:
        the run is then not continued bit for bit.
    """
    recorded = on_rank_zero(lambda: next((one.layers for one in read_attempts(folder.path)[::-1]), ""))
    if (
        recorded == "torch"
        and platform.layers == "cpu"
        and config.layers == "auto"
        and not config.bf16_products
    ):
        platform = platform.with_torch_layers(f"as in {FILE_NAME}")
    if not recorded or recorded == platform.layers_id:
        return platform, ()
    return platform, (
        f'{FILE_NAME} has the layers "{recorded}", and this start computes with "{platform.layers_id}": the run is '
        "not continued bit for bit. For that, resume on a machine like the first, with the same platform.layers",
    )
