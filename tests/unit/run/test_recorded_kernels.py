"""What a resume does with the kernels that a run has recorded."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mcore_rl.backend.cpu.compiled import build_id
from mcore_rl.backend.cpu.kernels import CpuKernels, Half, Rounded, in_use, using
from mcore_rl.backend.platform import Platform, start, with_kernels
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.obs.attempts import this_run_attempt
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.run.recorded_kernels import keep_kernels
from mcore_rl.train.run_folder import RunFolder

HERE = CpuKernels("mkl", "sdpa", build_id())


@pytest.fixture
def platform(one_rank: Mesh) -> Iterator[Platform]:
    with using(HERE):
        yield start(PlatformConfig(products=HERE.products, attention=HERE.attention))


def recorded(folder: Path, platform: Platform, *kernels: dict[str, str]) -> RunFolder:
    attempt = asdict(this_run_attempt(platform, MeshConfig(), 0))
    assert attempt["kernels"] == HERE.record()
    (folder / "run.json").write_text(json.dumps([attempt | {"kernels": of_start} for of_start in kernels]))
    return RunFolder(folder)


def test_the_kernels_of_the_last_start_are_taken(tmp_path: Path, platform: Platform) -> None:
    there = CpuKernels("onednn", "blocks")
    folder = recorded(tmp_path, platform, HERE.record(), there.record())
    resumed, warnings = keep_kernels(PlatformConfig(), platform, folder)
    assert (resumed.kernels, in_use(), warnings) == (there, there, ())
    assert "oneDNN's products, own attention, no compiled layers (of run.json)" in resumed.describe()


def test_a_new_run_and_one_of_before_the_record_keep_what_was_measured(
    tmp_path: Path, platform: Platform
) -> None:
    assert keep_kernels(PlatformConfig(), platform, RunFolder(tmp_path)) == (platform, ())
    assert keep_kernels(PlatformConfig(), platform, recorded(tmp_path, platform, {})) == (platform, ())


def test_what_the_config_names_is_used_and_the_difference_reported(
    tmp_path: Path, platform: Platform
) -> None:
    folder = recorded(tmp_path, platform, HERE.record() | {"products": "onednn", "attention": "blocks"})
    resumed, (warning,) = keep_kernels(PlatformConfig(products="mkl"), platform, folder)
    assert resumed.kernels == in_use() == CpuKernels("mkl", "blocks", build_id())
    assert warning.startswith(
        "run.json has products 'onednn', and this start computes with torch's products (MKL), "
    )
    assert "is not continued bit for bit" in warning


@pytest.mark.parametrize("then", ["torch", "mkl", "compiled", "compiled_fp32"])
def test_who_rounded_is_kept_where_products_and_build_are_the_same(
    tmp_path: Path, platform: Platform, then: Rounded
) -> None:
    there = replace(HERE, products="bf16", rounded=then)
    other: Rounded = "torch" if then == "compiled" else "compiled"
    here = with_kernels(platform, replace(there, rounded=other), "")
    config = PlatformConfig(products="bf16")
    resumed, warnings = keep_kernels(config, here, recorded(tmp_path, platform, there.record()))
    assert (resumed.kernels, in_use(), warnings) == (there, there, ())
    unlike, (warning,) = keep_kernels(config, here, recorded(tmp_path, platform, HERE.record()))
    assert unlike.kernels == here.kernels and "has products 'mkl'" in warning


def test_a_resume_without_the_field_that_rounded_does_not_round(tmp_path: Path, platform: Platform) -> None:
    there = replace(HERE, products="bf16", rounded="compiled")
    resumed, (warning,) = keep_kernels(
        PlatformConfig(), platform, recorded(tmp_path, platform, there.record())
    )
    assert resumed.kernels == in_use() == HERE
    assert "run.json has products 'bf16'" in warning and "is not continued bit for bit" in warning


def test_a_model_in_bf16_goes_on_with_products_of_bf16(tmp_path: Path, platform: Platform) -> None:
    there = replace(HERE, products="bf16", rounded="compiled", half="fp32")
    here = with_kernels(platform, replace(HERE, half="fp32"), "of this machine")
    folder = recorded(tmp_path, platform, there.record())
    resumed, warnings = keep_kernels(PlatformConfig(precision="bf16"), here, folder)
    assert (resumed.kernels, in_use(), warnings) == (there, there, ())


def test_how_bf16_was_multiplied_is_kept(tmp_path: Path, platform: Platform) -> None:
    there = replace(HERE, half="fp32")
    here = with_kernels(platform, replace(HERE, half="torch"), "of this machine")
    resumed, warnings = keep_kernels(
        PlatformConfig(precision="bf16"), here, recorded(tmp_path, platform, there.record())
    )
    assert (resumed.kernels, in_use(), warnings) == (there, there, ())


def test_a_run_in_bf16_of_before_the_record_goes_on_as_torch_computes(
    tmp_path: Path, platform: Platform
) -> None:
    before = HERE.record()
    del before["half"]
    widened = with_kernels(platform, replace(HERE, half="fp32"), "of this machine")
    resumed, warnings = keep_kernels(
        PlatformConfig(precision="bf16"), widened, recorded(tmp_path, platform, before)
    )
    assert (resumed.kernels.half, in_use().half, warnings) == ("torch", "torch", ())


@pytest.mark.parametrize(("then", "now"), [("none", "fp32"), ("fp32", "none"), ("none", "none")])
def test_a_start_of_the_other_precision_computes_bf16_as_is_fastest_here(
    tmp_path: Path, platform: Platform, then: Half, now: Half
) -> None:
    folder = recorded(tmp_path, platform, replace(HERE, half=then).record())
    here = with_kernels(platform, replace(HERE, half=now), "of this machine")
    config = PlatformConfig(precision="fp32" if now == "none" else "bf16")
    resumed, warnings = keep_kernels(config, here, folder)
    assert (resumed.kernels, in_use(), warnings) == (here.kernels, here.kernels, ())


def test_a_library_that_is_not_here_is_reported(tmp_path: Path, platform: Platform) -> None:
    folder = recorded(tmp_path, platform, HERE.record() | {"products": "blis"})
    resumed, (warning,) = keep_kernels(PlatformConfig(), platform, folder)
    assert resumed is platform and "run.json has products 'blis', and this start" in warning


def test_a_build_that_is_not_here_is_reported(tmp_path: Path, platform: Platform) -> None:
    folder = recorded(tmp_path, platform, HERE.record() | {"compiled": "0123456789abcdef"})
    resumed, (warning,) = keep_kernels(PlatformConfig(), platform, folder)
    assert resumed.kernels == HERE
    assert (
        "run.json has compiled '0123456789abcdef', and this start computes with torch's products" in warning
    )


def test_compiled_attention_needs_the_compiled_file(tmp_path: Path, platform: Platform) -> None:
    there = HERE.record() | {"attention": "compiled"}
    resumed, warnings = keep_kernels(PlatformConfig(), platform, recorded(tmp_path, platform, there))
    assert resumed.kernels == in_use() == CpuKernels("mkl", "compiled", build_id()) and not warnings
    without = with_kernels(platform, CpuKernels("mkl", "sdpa"), "without a compiler")
    resumed, (warning,) = keep_kernels(PlatformConfig(), without, RunFolder(tmp_path))
    assert resumed is without
    assert warning.startswith("run.json has attention 'compiled' and compiled '")
