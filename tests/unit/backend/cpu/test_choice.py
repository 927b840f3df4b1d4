from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mcore_rl.backend.cpu import choice
from mcore_rl.backend.cpu.choice import choose, fastest, fastest_attention
from mcore_rl.backend.cpu.compiled import BuildError, build_id, library
from mcore_rl.backend.cpu.kernels import ROUNDED_NAMES, CpuKernels, from_record, in_use, use, using
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import ConfigError


@pytest.fixture(autouse=True)
def kernels_as_before() -> Iterator[None]:
    with using(in_use()):
        yield


def test_what_the_config_names_is_taken_unmeasured() -> None:
    named = PlatformConfig(products="mkl", attention="blocks", compiled=False)
    wanted = "torch's products (MKL), own attention, no compiled layers"
    assert choose(named, 1) == (CpuKernels("mkl", "blocks"), wanted)


def test_compiled_layers_need_one_thread_a_compiler_and_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    named = PlatformConfig(products="mkl", attention="sdpa")
    assert choose(named, 1) == (
        CpuKernels("mkl", "sdpa", build_id()),
        "torch's products (MKL), torch's attention, compiled layers",
    )
    tiled, sentence = choose(named.model_copy(update={"batch_invariant": True}), 1)
    assert tiled.compiled == "none" and sentence.endswith(
        "(platform.batch_invariant=true needs products in tiles)"
    )

    def fail() -> None:
        raise BuildError("there is no compiler")

    monkeypatch.setattr(choice, "library", fail)
    without, sentence = choose(named, 1)
    assert without.compiled == "none" and sentence.endswith("no compiled layers (there is no compiler)")
    measured, sentence = choose(PlatformConfig(products="mkl"), 1)
    assert measured.attention != "compiled" and ", compiled " not in sentence.partition("; measured: ")[2]
    with pytest.raises(
        ConfigError, match=r'platform\.attention="compiled", and it cannot be: there is no comp'
    ):
        choose(named.model_copy(update={"attention": "compiled"}), 1)
    with pytest.raises(
        ConfigError, match=r"platform\.compiled=true, and it cannot be: there is no compiler\. Use"
    ):
        choose(named.model_copy(update={"compiled": True}), 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert choose(named, 1)[1].endswith("(they compute with one thread, and this rank has 2)")


def test_measuring_names_its_times_and_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    choice.measurements.cache_clear()
    use(CpuKernels("onednn", "blocks"))
    state = torch.get_rng_state()
    kernels, sentence = choose(PlatformConfig(), 1)
    assert torch.equal(torch.get_rng_state(), state) and in_use() == CpuKernels("onednn", "blocks")
    assert sentence.startswith(kernels.describe() + "; measured: mkl ")
    names = "onednn", "sdpa", "compiled", "blocks"
    measured = sentence.partition("; measured: ")[2]
    assert all(f", {name} " in measured for name in names) and measured.endswith(" ms")
    half, _ = choose(PlatformConfig(attention="sdpa"), 1)
    assert half.attention == "sdpa"
    monkeypatch.setattr("time.thread_time", lambda: pytest.fail("a process measures once"))
    assert choose(PlatformConfig(), 1) == (kernels, sentence)


def test_beside_rounded_products_attention_is_measured_without_the_one_of_products() -> None:
    kernels, sentence = choose(PlatformConfig(products="bf16"), 1)
    assert kernels.products == "bf16" and kernels.attention in ("sdpa", "compiled")
    measured = sentence.partition("; measured: ")[2]
    assert "sdpa " in measured and ", compiled " in measured and "blocks" not in measured


@pytest.mark.parametrize(
    ("sdpa_s", "compiled_s", "blocks_s", "wanted"),
    [
        (1.0, 0.4, 0.39, "compiled"),  # Else runs on one machine would differ by noise.
        (1.0, 0.4, 0.3, "blocks"),
        (1.0, 0.9, 0.95, "sdpa"),
        (1.0, 0.9, 0.7, "blocks"),
    ],
)
def test_own_attention_must_be_clearly_faster_than_the_compiled_one(
    sdpa_s: float, compiled_s: float, blocks_s: float, wanted: str
) -> None:
    assert fastest_attention({"sdpa": sdpa_s, "compiled": compiled_s, "blocks": blocks_s}) == wanted


@pytest.mark.parametrize(("onednn_s", "wanted"), [(0.5, "onednn"), (0.9, "mkl"), (1.0, "mkl"), (3.0, "mkl")])
def test_another_library_than_torchs_must_be_clearly_faster(onednn_s: float, wanted: str) -> None:
    """Else two runs on one machine would differ by the noise of a measurement."""
    assert fastest({"mkl": 1.0, "onednn": onednn_s}, "mkl") == wanted


def test_who_rounds_is_measured_with_the_compiled_file_where_it_does() -> None:
    kernels, sentence = choose(PlatformConfig(products="bf16", attention="sdpa"), 1)
    assert kernels.products == "bf16" and kernels.compiled == build_id()
    measured = sentence.partition("; measured: ")[2]
    names = ["torch", "mkl", *["compiled"] * library().rounds_operands]
    names += ["compiled_fp32"] * (library().multiplies_bf16 and library().sgemm is not None)
    assert all(f"bf16 {name} " in measured for name in names) and ", fp32 " in measured
    assert sentence.startswith(ROUNDED_NAMES[kernels.rounded])
    without, sentence = choose(PlatformConfig(products="bf16", attention="sdpa", compiled=False), 1)
    assert without == CpuKernels("bf16", "sdpa", "none", without.rounded) and without.rounded != "compiled"
    assert "; measured: bf16 mkl " in sentence and ", bf16 torch " in sentence
    assert "bf16 compiled" not in sentence


@pytest.mark.parametrize(
    ("torch_s", "mkl_s", "fp32_s", "compiled_s", "wanted", "saves"),
    [
        (5.0, 1.05, None, 1.02, "compiled", False),  # There is no instruction for bf16.
        (0.1, 1.05, 1.02, 0.5, "torch", True),  # There is AMX.
        (0.5, 1.05, 1.02, 0.45, "compiled", True),  # There is AVX-512's instruction.
        (1.9, 1.4, 1.1, 1.8, "compiled_fp32", False),  # It is no faster than two of fp32.
    ],
)
def test_a_run_learns_that_rounding_saves_no_time(
    torch_s: float,
    mkl_s: float,
    fp32_s: float | None,
    compiled_s: float,
    wanted: str,
    saves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice.measurements.cache_clear()
    times = {"bf16 torch": torch_s, "bf16 mkl": mkl_s, "bf16 compiled": compiled_s, "fp32": 1.0}
    times |= {} if fp32_s is None else {"bf16 compiled_fp32": fp32_s}
    ways = tuple(name.removeprefix("bf16 ") for name in times if name not in ("fp32", "bf16 compiled"))
    monkeypatch.setattr(choice, "_rounded_here", lambda compiled: (*ways, "compiled"))
    monkeypatch.setattr(choice, "_least_s", lambda candidates: {name: times[name] for name in candidates})
    kernels, sentence = choose(PlatformConfig(products="bf16", attention="sdpa"), 1)
    choice.measurements.cache_clear()
    assert kernels.rounded == wanted
    assert sentence.endswith("; products of bf16 save no time on this processor") is not saves


@pytest.mark.parametrize(
    ("compiled_s", "fp32_s", "wanted"),
    [
        (0.2, 0.3, CpuKernels("bf16", "sdpa", "", "compiled", "fp32")),
        (0.2, 0.21, CpuKernels("mkl", "sdpa", "", "torch", "fp32")),
    ],
)
def test_a_model_in_bf16_multiplies_in_it_where_that_is_clearly_faster(
    compiled_s: float, fp32_s: float, wanted: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all else, norms and attention, its tensors are computed in fp32."""
    choice.measurements.cache_clear()
    times = dict.fromkeys(("bf16 mkl", "bf16 compiled_fp32"), 1.0) | {"bf16 torch": 0.17}
    times |= {"bf16 compiled": compiled_s, "fp32": fp32_s, "mkl": fp32_s, "onednn": fp32_s}
    monkeypatch.setattr(choice, "_least_s", lambda candidates: {name: times[name] for name in candidates})
    wanted = replace(wanted, compiled=build_id())
    kernels, sentence = choose(PlatformConfig(precision="bf16", attention="sdpa"), 1)
    assert kernels == wanted
    assert "tensors in bf16 by fp32" in sentence and "save no time" not in sentence
    named, _ = choose(PlatformConfig(precision="bf16", products="mkl", attention="sdpa"), 1)
    assert named == replace(wanted, products="mkl", rounded="torch")
    # Without the file a product of torch's in bf16 is fast only for numbers of rows that it has met.
    without, _ = choose(PlatformConfig(precision="bf16", attention="sdpa", compiled=False), 1)
    assert without == CpuKernels("mkl", "sdpa", half="fp32")
    in_fp32, _ = choose(PlatformConfig(attention="sdpa"), 1)
    choice.measurements.cache_clear()
    assert in_fp32 == CpuKernels("mkl", "sdpa", build_id())


def test_a_record_is_read_again_unless_it_names_what_is_not_here() -> None:
    kernels = CpuKernels("mkl", "sdpa")
    assert from_record(kernels.record()) == kernels
    assert from_record({"products": "blis", "attention": "sdpa"}) is None
    compiled = CpuKernels("mkl", "compiled", "0123456789abcdef")
    assert from_record(compiled.record()) == compiled
    assert from_record(compiled.record() | {"compiled": "none"}) is None
    assert from_record({}) is None
    rounding = CpuKernels("bf16", "sdpa", "0123456789abcdef", "compiled")
    assert from_record(rounding.record()) == rounding
    before_the_choice = {"products": "bf16", "attention": "sdpa", "compiled": "0123456789abcdef"}
    assert from_record(before_the_choice) == CpuKernels("bf16", "sdpa", "0123456789abcdef", "torch", "torch")
    assert from_record(before_the_choice | {"rounded": "blis"}) is None
    halves = CpuKernels("mkl", "sdpa", half="fp32")
    assert from_record(halves.record()) == halves
    assert from_record(halves.record() | {"half": "blis"}) is None
