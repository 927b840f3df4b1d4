"""The compiled file and the Python beside it compute the same, which is what float64 computes."""

import ctypes
import mmap
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.backend.cpu import compiled
from mcore_rl.backend.cpu.compiled import BuildError, Library, build_id, library
from mcore_rl.backend.cpu.kernels import CpuKernels, Process, Rounded, in_use, using
from mcore_rl.backend.cpu.megatron_speed import rotated_in_halves
from mcore_rl.backend.cpu.products import add_weight_gradient, linear, product
from mcore_rl.model.layers.cpu.experts import assign_routed, swiglu_experts
from mcore_rl.model.layers.cpu.norm import rms_norm


@pytest.fixture(params=["compiled", "python"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """One build for all tests of this machine: it stays in the user's cache."""
    with using(CpuKernels("mkl", "sdpa", build_id() if request.param == "compiled" else "none", half="fp32")):
        yield


@pytest.fixture(scope="module")
def without_amx(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The file as a processor without AMX has it."""
    path = tmp_path_factory.mktemp("build") / "layers.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "OPTIONS", (*compiled.OPTIONS, "-U__AMX_BF16__"))
        compiled._compile(path)
    return Library(path)


@pytest.fixture(params=["file or torch", "file in fp32 or mkl", "file without AMX"])
def rounding(
    kernels: None, without_amx: Library, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[float]:
    """Products of operands rounded to bf16, by MKL in fp32 or in the compiled file where it is in use, else by torch in
    bf16; yields their relative error: of fp32, and of a result that is rounded too by torch.
    """
    build = in_use().compiled
    in_file = build != "none" and library().rounds_operands
    ways: tuple[Rounded, Rounded] = ("compiled", "compiled_fp32") if in_file else ("torch", "mkl")
    rounded = ways[request.param == "file in fp32 or mkl"]
    with using(CpuKernels("bf16", "sdpa", build, rounded)):
        if request.param == "file without AMX" and build != "none":
            monkeypatch.setattr(Process, "library", without_amx)
        yield 2**-7 if rounded == "torch" else 2e-6


FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def assert_gradients(actual: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    """Compare both and their gradients, relative to the largest element; in bf16 each element is rounded once besides,
    to itself or, in fp32's error, its neighbour: 2 ** -7 of it.
    """
    weight = torch.randn_like(actual)
    found = torch.autograd.grad((actual * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), inputs)
    formats = [input.dtype for input in inputs]
    for ours, theirs, dtype in zip(
        (actual, *found), (expected, *wanted), (formats[0], *formats), strict=True
    ):
        assert ours.dtype == dtype
        error = (ours.double() - theirs.double()).abs() - rounding_of(dtype) * theirs.double().abs()
        assert error.max() <= tolerance * theirs.abs().max()


def rounding_of(dtype: torch.dtype) -> float:
    """The distance of neighbours, relative to them."""
    return torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0


@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 1, 7), (700, 2, 33), (0, 2, 64)], ids=str)
@pytest.mark.parametrize("is_dense", [True, False])
@FORMATS
def test_a_norm_is_that_of_float64(shape: tuple[int, ...], is_dense: bool, dtype: torch.dtype) -> None:
    input = torch.randn(shape).to(dtype).requires_grad_()
    rows = input if is_dense else input.transpose(0, 1)
    weight = torch.rand(shape[-1]).to(dtype).requires_grad_()
    wide = rows.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    actual = rms_norm(rows, weight, 1e-5)
    if not shape[0]:
        assert actual.shape == rows.shape and not torch.autograd.grad(actual.sum(), weight)[0].any()
        return
    assert_gradients(actual, expected, [input, weight], 2e-6)


@FORMATS
def test_a_rotation_is_that_of_complex_numbers(dtype: torch.dtype) -> None:
    heads = torch.randn(19, 3, 4, 32).to(dtype).requires_grad_()
    angles_S = torch.arange(19.0)[:, None] * 0.7 ** torch.arange(16)
    freqs = torch.cat([angles_S, angles_S], -1)[:, None, None]
    actual = rotated_in_halves(lambda *_: pytest.fail("not computed here"))(heads, freqs)
    first, second = heads.double().chunk(2, -1)
    turned = (
        torch.complex(first, second)
        * torch.polar(torch.ones(19, 16, dtype=torch.float64), angles_S.double())[:, None, None]
    )
    expected = torch.cat([turned.real, turned.imag], -1)
    assert_gradients(actual, expected, [heads], 1e-6)


@FORMATS
def test_without_a_gradient_the_same_is_computed(dtype: torch.dtype) -> None:
    """Bit for bit: recomputation and passes for logprobs are without one."""
    shapes = (40, 2, 24), (16, 24), (24,), (4, 40, 24), (4, 24, 20)
    input, weight, scale, fc1, fc2 = (torch.randn(shape).to(dtype) for shape in shapes)
    freqs, routed_TE, gates = torch.randn(40, 1, 1, 24), routed(80, 4, 2), torch.rand(80, 4)
    rotate = rotated_in_halves(lambda *_: pytest.fail("not computed here"))

    def results() -> list[Tensor]:
        return [
            linear(input, weight),
            rms_norm(input, scale, 1e-5),
            rotate(input[:, :, None], freqs),
            swiglu_experts(input.view(80, 24), gates, fc1, fc2, assign_routed(routed_TE)),
        ]

    for tensor in (input, weight, scale, gates, fc1, fc2):
        tensor.requires_grad_()
    with torch.no_grad():
        plain = results()
    for without, recorded in zip(plain, results(), strict=True):
        assert torch.equal(without, recorded) and recorded.requires_grad and not without.requires_grad


def routed(num_tokens: int, num_experts: int, per_token: int) -> Tensor:
    chosen = torch.rand(num_tokens, num_experts).topk(per_token).indices
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 4), (90, 4), (1300, 3), (40, 64)])
@FORMATS
def test_experts_are_those_of_float64(num_tokens: int, num_experts: int, dtype: torch.dtype) -> None:
    """Also blocks of more than one, and experts without a token; gates are fp32, as a router's."""
    routed_TE = routed(num_tokens, num_experts, 2)
    input = torch.randn(num_tokens, 24).to(dtype).requires_grad_()
    gates = torch.rand(num_tokens, num_experts, requires_grad=True)
    fc1 = (torch.randn(num_experts, 40, 24) / 5).to(dtype).requires_grad_()
    fc2 = (torch.randn(num_experts, 24, 20) / 5).to(dtype).requires_grad_()
    actual = swiglu_experts(input, gates, fc1, fc2, assign_routed(routed_TE))
    x, w1, w2 = input.double(), fc1.double(), fc2.double()
    gate_up = torch.einsum("td,efd->tef", x, w1)
    active = torch.nn.functional.silu(gate_up[..., :20]) * gate_up[..., 20:]
    expected = torch.einsum("tef,edf,te->td", active, w2, gates.double() * routed_TE)
    assert_gradients(actual, expected, [input, gates, fc1, fc2], 4e-6)


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_experts_in_bf16_are_added_to_what_is_in_the_buffer(sums: torch.dtype) -> None:
    """Also to one in bf16 (`optim.main_grads_dtype`), which the compiled file cannot add to."""
    routed_TE, input = routed(90, 4, 2), torch.randn(90, 24).bfloat16()
    fc1, fc2 = torch.randn(4, 40, 24).bfloat16(), torch.randn(4, 24, 20).bfloat16()

    def results(*weights: Tensor) -> Tensor:
        return swiglu_experts(input, torch.ones(90, 4), *weights, assign_routed(routed_TE)).sum()

    alone = [weight.float().bfloat16().requires_grad_() for weight in (fc1, fc2)]
    results(*alone).backward()
    buffered = [weight.requires_grad_() for weight in (fc1, fc2)]
    for weight in buffered:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=sums), False  # type: ignore[attr-defined]
    results(*buffered).backward()
    for weight, expected in zip(buffered, alone, strict=True):
        assert expected.grad is not None and weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
        wanted = 1.0 + expected.grad.double()
        found = weight.main_grad.double()  # type: ignore[attr-defined]
        # Of two formats each rounds to 8 bits, at the size of the gradient and of the sum.
        tolerance = 2**-8 * (expected.grad.double().abs() + wanted.abs() * (sums == torch.bfloat16)) * 1.01
        assert (found - wanted).abs().le(tolerance + 1e-5 * wanted.abs().max()).all()


def rounded(tensor: Tensor) -> Tensor:
    return tensor.detach().bfloat16().double()


@pytest.mark.parametrize("layout", ["rows", "columns", "parts", "every second"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (1, 1, 1),
        (5, 33, 7),
        (12, 32, 64),
        (97, 257, 514),
        (130, 300, 1031),
        (3, 16, 31),
        (0, 4, 4),
        (4, 4, 0),
    ],
)
def test_rounded_products_are_those_of_float64(
    rounding: float, rows: int, columns: int, depth: int, layout: str
) -> None:
    """Of operands rounded to the nearest bf16; also of views, whose neighbours in memory are not read."""

    def operand(first: int, second: int) -> Tensor:
        if layout == "columns":
            return torch.randn(second, first).t()
        step = 2 if layout == "every second" else 1
        surrounded = torch.full((first + 2, (second + 3) * step), float("nan"))
        inside = surrounded[1 : first + 1, step : (second + 1) * step : step]
        inside.copy_(torch.randn(first, second))
        return inside if layout != "rows" else inside.contiguous()

    left, right = operand(rows, depth), operand(columns, depth)
    exact = rounded(left) @ rounded(right).t()
    scale = (rounded(left).abs() @ rounded(right).abs().t()).max() if exact.numel() else 0.0
    found, total = product(left, right), torch.full((rows, columns), 0.5)
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert not exact.numel() or (found - exact).abs().max() <= rounding * scale
    add_weight_gradient(total, left.t(), right.t())
    assert not exact.numel() or (total - 0.5 - exact).abs().max() <= max(rounding * scale, 1e-6)
    assert torch.equal(product(left, right), found)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(33, 21, 70), (5, 47, 31)])
def test_nothing_behind_an_operand_is_read(rounding: float, rows: int, columns: int, depth: int) -> None:
    """Reading there would end the process: the next page belongs to nobody."""

    def operand(first: int, second: int) -> Tensor:
        pages = mmap.mmap(-1, 64 * mmap.PAGESIZE)
        end = 63 * mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + end
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0) == 0
        offset = end - 4 * first * second
        tensor = torch.frombuffer(pages, dtype=torch.float32, count=first * second, offset=offset)
        return tensor.view(first, second).copy_(torch.randn(first, second))

    left, right, gradient = operand(rows, depth), operand(columns, depth), operand(rows, columns)
    total = operand(columns, depth).zero_()
    for found, exact in (
        (product(left, right), rounded(left) @ rounded(right).t()),
        (product(gradient, right.t()), rounded(gradient) @ rounded(right)),
    ):
        assert (found - exact).abs().max() <= rounding * 4 * exact.abs().max()
    add_weight_gradient(total, gradient, left)
    exact = rounded(gradient).t() @ rounded(left)
    assert (total - exact).abs().max() <= rounding * 4 * exact.abs().max()


def test_the_gradient_of_a_part_of_a_buffer_touches_no_other(rounding: float) -> None:
    buffer, gradient, input = torch.full((9, 60), 3.0), torch.randn(50, 7), torch.randn(50, 40)
    add_weight_gradient(buffer[1:8, 10:50], gradient, input)
    expected = torch.full((9, 60), 3.0, dtype=torch.float64)
    expected[1:8, 10:50] += rounded(gradient).t() @ rounded(input)
    torch.testing.assert_close(buffer.double(), expected, rtol=rounding, atol=50 * rounding)
    assert (buffer[0] == 3.0).all() and (buffer[8] == 3.0).all() and (buffer[:, :10] == 3.0).all()
    assert (buffer[:, 50:] == 3.0).all()


def test_rounding_is_to_even_and_keeps_what_is_not_finite(rounding: float) -> None:
    # Two ties, one between 1 and the next bf16; the last but one rounds to infinity.
    numbers = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -2.5, float("inf"), 3.4e38, float("nan")])
    wanted = torch.tensor([1.0, 1 + 2**-6, -2.5, float("inf"), float("inf"), float("nan")])
    found = product(numbers[:, None], torch.ones(1, 1))[:, 0]
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(90, 4), (1300, 3), (40, 64)])
def test_rounded_experts_are_those_of_float64(rounding: float, num_tokens: int, num_experts: int) -> None:
    """Within what rounding of operands changes, in which the gates' products and all sums have no part."""
    routed_TE = routed(num_tokens, num_experts, 2)
    input, gates = torch.randn(num_tokens, 24, requires_grad=True), torch.rand(num_tokens, num_experts)
    gates.requires_grad_()
    fc1 = (torch.randn(num_experts, 40, 24) / 5).requires_grad_()
    fc2 = (torch.randn(num_experts, 24, 20) / 5).requires_grad_()
    operands = [input, gates, fc1, fc2]
    actual = swiglu_experts(*operands, assign_routed(routed_TE))
    with using(replace(in_use(), products="mkl")):
        unrounded = swiglu_experts(*operands, assign_routed(routed_TE))
        wanted = torch.autograd.grad(unrounded.square().sum(), operands)
    found = torch.autograd.grad(actual.square().sum(), operands)
    for ours, exact in zip((actual, *found), (unrounded, *wanted), strict=True):
        assert (ours - exact).abs().max() <= 2**-5 * exact.abs().max()
    are_rounded = in_use().rounding or in_use().compiled == "none"
    if are_rounded and in_use().rounded != "torch":
        assert (actual - unrounded).abs().max() > 2**-12 * unrounded.abs().max()
        # Inputs and first weights that bf16 has: what is left are the rounded activations, each times its gate.
        x, w1, w2 = (rounded(tensor) for tensor in (input, fc1, fc2))
        gate_up = torch.einsum("td,efd->tef", x, w1)
        active = torch.nn.functional.silu(gate_up[..., :20]) * gate_up[..., 20:] * gates.detach()[..., None]
        exact_TD = torch.einsum("tef,edf,te->td", rounded(active), w2, routed_TE.double())
        # One activation in 2,000 lies so near the middle of two bf16 that fp32 rounds it to the other, which its whole
        # row shows; rows have 40.
        error_TD = (actual - exact_TD).abs() / exact_TD.abs().max()
        assert error_TD.max() < 2**-8 and (error_TD < 1e-6).double().mean() > 0.75


def test_experts_of_rounded_products_have_round_numbers_of_rows_where_each_number_is_compiled(
    rounding: float,
) -> None:
    routed_TE = torch.zeros(60, 2, dtype=torch.bool)
    routed_TE[:37, 0] = routed_TE[:, 1] = True
    sizes = [block.rows.stop - block.rows.start for block in assign_routed(routed_TE).blocks]
    assert sizes == ([48, 64] if in_use().rounded == "torch" else [37, 60])


def test_experts_beside_rounded_products_are_rounded_where_they_are_not_compiled() -> None:
    """Compiled ones where torch multiplies rounded operands are those of products by MKL, bit for bit."""
    routed_TE, input, gates = routed(60, 4, 2), torch.randn(60, 32), torch.rand(60, 4)
    weights = torch.randn(4, 24, 32), torch.randn(4, 32, 12)
    plain = swiglu_experts(input, gates, *weights, assign_routed(routed_TE))
    with using(replace(in_use(), products="bf16")):
        beside = swiglu_experts(input, gates, *weights, assign_routed(routed_TE))
    if in_use().compiled == "none":
        error = (beside - plain).abs().max() / plain.abs().max()
        assert 2**-12 < error < 2**-6  # eight bits of each operand
    else:
        assert torch.equal(beside, plain)


def test_experts_keep_what_is_not_finite_and_their_result_is_the_same_again() -> None:
    """A run finds a bad gradient by that, and a resume is bit-equal by this."""
    routed_TE = routed(50, 4, 2)
    input, gates = torch.randn(50, 16), torch.rand(50, 4)
    weights = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    once, again = (swiglu_experts(input, gates, *weights, assign_routed(routed_TE)) for _ in range(2))
    assert torch.equal(once, again)
    input[7, 3], input[9] = float("nan"), 1e30
    broken = swiglu_experts(input, gates, *weights, assign_routed(routed_TE))
    assert broken[7].isnan().all() and not broken[9].isfinite().all()
    others = [row for row in range(50) if row not in (7, 9)]
    assert torch.equal(broken[others], once[others])


def test_experts_make_no_denormal_numbers_of_ordinary_ones() -> None:
    """Each would cost an Intel processor 150 cycles: the activation of a layer took seven times as long."""
    underflow = {"x86_64": 0x10, "aarch64": 0x08}[platform.machine()]  # FE_UNDERFLOW
    libm = ctypes.CDLL("libm.so.6")
    input, gates = torch.randn(60, 32, requires_grad=True), torch.rand(60, 4) + 0.1
    weights = torch.randn(4, 24, 32, requires_grad=True), torch.randn(4, 32, 12, requires_grad=True)
    libm.feclearexcept(underflow)
    swiglu_experts(input, gates, *weights, assign_routed(routed(60, 4, 2))).square().sum().backward()
    assert not libm.fetestexcept(underflow)
    assert (torch.tensor(1e-30) * 1e-10 < 1e-38).item() and libm.fetestexcept(underflow)


def test_weights_of_a_buffer_get_their_gradient_there() -> None:
    routed_TE, input = routed(30, 4, 2), torch.randn(30, 16)
    gates = torch.rand(30, 4)
    plain = [torch.randn(4, 24, 16, requires_grad=True), torch.randn(4, 16, 12, requires_grad=True)]
    buffered = [weight.detach().clone().requires_grad_() for weight in plain]
    for weight in buffered:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False  # type: ignore[attr-defined]
    for weights in (plain, buffered):
        swiglu_experts(input, gates, *weights, assign_routed(routed_TE)).square().sum().backward()
    for weight, other in zip(buffered, plain, strict=True):
        torch.testing.assert_close(weight.main_grad, 1.0 + other.grad, rtol=1e-5, atol=1e-4)  # type: ignore[attr-defined, operator]
        assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_a_build_is_named_by_all_that_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a changed file would be taken from the cache as it was."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*compiled.SOURCES, *compiled.HEADERS)}
    included = {name for text in texts.values() for name in re.findall(r'#include "(.+)"', text)}
    assert included == {path.name for path in compiled.HEADERS}
    builds = {build_id.__wrapped__()}
    for kind in ("SOURCES", "HEADERS"):
        paths = getattr(compiled, kind)
        changed = tmp_path / paths[-1].name
        changed.write_text(texts[changed.name] + "\n", encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(compiled, kind, (*paths[:-1], changed))
            builds.add(build_id.__wrapped__())
    assert len(builds) == 3


def test_where_there_is_no_compiler_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: str(tmp_path / "c++"))
    for cached in (build_id, library):
        with pytest.raises(BuildError, match=r"there is no compiler: .*No such file.*c\+\+"):
            cached.__wrapped__()
    broken = tmp_path / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: no assembler" >&2; exit 4\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: str(broken))
    monkeypatch.setattr(compiled, "build_id", lambda: "other")
    with pytest.raises(BuildError, match="ended with 4: fatal error: no assembler"):
        library.__wrapped__()
    assert not list((tmp_path / "mcore_rl").glob("*.so"))
