"""Products of operands rounded to bf16 are those of float64, on every processor."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.megatron import compiled
from mcore_rl.megatron.compiled import Library, rounded_linear, rounded_product

ROUNDING = 2e-6
"""Relative error of a sum in fp32."""


def changed(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    """Return a copy of a file of the package with changes."""
    source = next(path for path in (*compiled.SOURCES, *compiled.HEADERS) if path.name == name)
    text = source.read_text(encoding="utf-8")
    for old, new in changes:
        assert re.search(old, text)
        text = re.sub(old, new, text)
    copy = folder / name
    copy.write_text(text, encoding="utf-8")
    return copy


@pytest.fixture(
    scope="module",
    params=["here", *(pytest.param(other, marks=pytest.mark.full) for other in ("the instruction", "sgemm"))],
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The file of this processor, as one without AMX has it, and as Intel's without AMX has it."""
    if request.param == "here":
        return compiled.library()
    folder = tmp_path_factory.mktemp("build")
    is_amd = "false" if request.param == "sgemm" else "true"
    changed(folder, "compiled_products.h", (r'__builtin_cpu_is\("amd"\)', is_amd))
    sources = [changed(folder, path.name) for path in compiled.SOURCES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "SOURCES", tuple(sources))
        patch.setattr(compiled, "OPTIONS", (*compiled.OPTIONS, "-U__AMX_BF16__"))
        compiled._compile(folder / "layers.so")
    return Library(folder / "layers.so")


@pytest.fixture(autouse=True)
def use_build(built: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: built)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.detach().bfloat16().double()


@pytest.mark.parametrize("layout", ["rows", "columns", "parts", "every second"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(1, 1, 1), (5, 33, 7), (12, 32, 64), (97, 257, 514), (130, 300, 1031), (3, 16, 31), (0, 4, 4), (4, 4, 0)],
)
def test_rounded_products_are_those_of_float64(rows: int, columns: int, depth: int, layout: str) -> None:
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
    found = rounded_product(left, right)
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert not exact.numel() or (found - exact).abs().max() <= ROUNDING * scale
    assert torch.equal(rounded_product(left, right), found)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(33, 21, 70), (5, 47, 31)])
def test_nothing_behind_an_operand_is_read(rows: int, columns: int, depth: int) -> None:
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
    for found, exact in (
        (rounded_product(left, right), rounded(left) @ rounded(right).t()),
        (rounded_product(gradient, right.t()), rounded(gradient) @ rounded(right)),
        (rounded_product(gradient.t(), left.t()), rounded(gradient).t() @ rounded(left)),
    ):
        assert (found - exact).abs().max() <= ROUNDING * 4 * exact.abs().max()


def test_rounding_is_to_even_and_keeps_what_is_not_finite() -> None:
    # Two ties, one between 1 and the next bf16; the last but one rounds to infinity.
    numbers = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -2.5, float("inf"), 3.4e38, float("nan")])
    wanted = torch.tensor([1.0, 1 + 2**-6, -2.5, float("inf"), float("inf"), float("nan")])
    found = rounded_product(numbers[:, None], torch.ones(1, 1))[:, 0]
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("shape", [(4, 16, 256), (37, 256), (0, 2, 256)], ids=str)
def test_a_linear_layer_rounds_the_operands_of_its_three_products(shape: tuple[int, ...]) -> None:
    input, weight = torch.randn(shape, requires_grad=True), torch.randn(192, 256, requires_grad=True)
    output = rounded_linear(input, weight)
    gradient = torch.randn_like(output)
    found = (output, *torch.autograd.grad(output, [input, weight], gradient))
    exact = (
        rounded(input) @ rounded(weight).t(),
        rounded(gradient) @ rounded(weight),
        rounded(gradient.view(-1, 192)).t() @ rounded(input.view(-1, 256)),
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        assert not ours.numel() or (ours - theirs).abs().max() <= ROUNDING * theirs.abs().max()
    with torch.no_grad():
        assert torch.equal(rounded_linear(input, weight), output)


def test_the_output_may_be_changed_in_place_and_a_frozen_weight_gets_no_gradient() -> None:
    """Megatron's cross entropy changes it."""
    input, weight = torch.ones(2, 3, 8, requires_grad=True), torch.full((4, 8), 0.5)
    output = rounded_linear(input, weight)
    output -= 1.0
    output.sum().backward()
    assert torch.equal(input.grad, torch.full((2, 3, 8), 2.0)) and weight.grad is None
