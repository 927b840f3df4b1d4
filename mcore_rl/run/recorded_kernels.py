"""The kernels of a CPU that a run was started with, which its resumes use."""

from mcore_rl.backend.cpu.kernels import from_record
from mcore_rl.backend.platform import Platform, with_kernels
from mcore_rl.config.run import PlatformConfig
from mcore_rl.obs.attempts_file import FILE_NAME, read_attempts
from mcore_rl.parallel.agree import on_rank_zero
from mcore_rl.train.run_folder import RunFolder


def keep_kernels(
    config: PlatformConfig, platform: Platform, folder: RunFolder
) -> tuple[Platform, tuple[str, ...]]:
    """Collective over the world: take the kernels that the last start of a run has recorded, before a model is built.

    A field that the config sets is used whatever was recorded.

    Returns:
        The platform with the kernels of this start, and warnings where they differ from the recorded ones: the run is
        then not continued bit for bit.
    """
    if platform.kernels is None:
        return platform, ()
    record = on_rank_zero(lambda: next((a.kernels for a in read_attempts(folder.path)[::-1]), {}))
    if not record:
        return platform, ()
    chosen = {"products": config.products, "attention": config.attention}
    wanted = {name: record.get(name, "") if value == "auto" else value for name, value in chosen.items()}
    if config.products == "auto" and config.precision == "fp32" and wanted["products"] == "bf16":
        # "auto" rounds no fp32: the field that did is gone.
        wanted["products"] = platform.kernels.products
    # A build of another processor, compiler or version is not here, and neither is one that this start does without.
    recorded_build = record.get("compiled", "none")
    is_here = config.compiled == "auto" and recorded_build in ("none", platform.kernels.compiled)
    wanted["compiled"] = recorded_build if is_here else platform.kernels.compiled
    # Who rounds was measured where products were of bf16, and with the compiled file of then.
    is_same = is_here and wanted["products"] == record.get("products")
    wanted["rounded"] = record.get("rounded", "torch") if is_same else platform.kernels.rounded
    # A start in fp32 chose nothing for tensors in bf16, and this one may be of either precision.
    half, half_here = record.get("half", "torch"), platform.kernels.half
    wanted["half"] = half_here if "none" in (half, half_here) else half
    kernels = from_record(wanted)
    if kernels is None:
        kernels = platform.kernels
    elif kernels != platform.kernels:
        platform = with_kernels(platform, kernels, f"of {FILE_NAME}")
    now = kernels.record()
    then = {"rounded": "torch"} | record | {"half": wanted["half"]}
    changed = [f"{name} {then.get(name)!r}" for name in now if then.get(name) != now[name]]
    if not changed:
        return platform, ()
    return platform, (
        f"{FILE_NAME} has {' and '.join(changed)}, and this start computes with {kernels.describe()}: "
        "the run is not continued bit for bit. "
        "For that, resume on a machine like the first, without platform.products, attention and compiled",
    )
