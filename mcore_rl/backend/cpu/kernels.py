"""Which library computes products and attention of this process on a CPU, and whether the compiled file does layers.

Like the number of threads this belongs to the process: layers, Megatron's patched functions and backward passes read it
where they compute. It decides the order of sums, so that a run records it and a resume takes what was recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from mcore_rl.backend.cpu.compiled import Library, library

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether torch was built with oneDNN, and gives its linear layer by itself."""
Products = Literal["mkl", "onednn", "bf16"]
Attention = Literal["blocks", "sdpa", "compiled"]
Rounded = Literal["torch", "mkl", "compiled", "compiled_fp32"]
Half = Literal["torch", "fp32", "none"]
NAMES = {
    "mkl": "torch's products (MKL)",
    "onednn": "oneDNN's products",
    "blocks": "own attention",
    "sdpa": "torch's attention",
    "compiled": "compiled attention",
}
"""The words of a log for each choice."""
ROUNDED_NAMES: dict[Rounded, str] = {
    "torch": "torch's products of operands rounded to bf16",
    "mkl": "fp32 products (MKL) of operands rounded to bf16",
    "compiled": "compiled products of operands rounded to bf16",
    "compiled_fp32": "compiled fp32 products (MKL) of operands rounded to bf16",
}
"""The words of a log for each way to multiply rounded operands."""


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The choice; fields as in PlatformConfig."""

    products: Products = "onednn" if HAS_ONEDNN else "mkl"
    attention: Attention = "blocks"
    compiled: str = "none"
    """Identity of the compiled file's build; "none" where Python computes what is in it."""
    rounded: Rounded = "torch"
    """Who multiplies operands that are rounded to bf16, with `products="bf16"`: torch in bf16, MKL in fp32, or the
    compiled file in bf16 where the processor does, else by MKL; "compiled_fp32": by MKL though the processor does."""
    half: Half = "none"
    """How layers compute with tensors in bf16: in fp32 by the kernels of fp32, with each result rounded once, or by
    torch in bf16, as runs of before did. "none": nothing was chosen, because `precision` is not "bf16"; if there are
    such tensors, torch computes with them."""

    def describe(self) -> str:
        """Return the choice in words, for a log."""
        compiled = "compiled layers" if self.compiled != "none" else "no compiled layers"
        is_rounded = self.products == "bf16"
        products = ROUNDED_NAMES[self.rounded] if is_rounded else NAMES[self.products]
        halves = ", tensors in bf16 by fp32" if self.half == "fp32" else ""
        return f"{products}{halves}, {NAMES[self.attention]}, {compiled}"

    @property
    def is_onednn(self) -> bool:
        """Whether oneDNN multiplies, which compiles a kernel for each new number of rows; in bf16 torch calls it."""
        return self.products == "onednn" or (self.products == "bf16" and self.rounded == "torch")

    @property
    def rounding(self) -> int:
        """How products round their operands in the compiled file: 0, not there; 1, to multiply in bf16 where the
        processor does; 2, to multiply in fp32.
        """
        return {"compiled": 1, "compiled_fp32": 2}.get(self.rounded, 0) if self.products == "bf16" else 0

    def record(self) -> dict[str, str]:
        """Return the choice as run.json has it."""
        return asdict(self)


def from_record(record: Mapping[str, str]) -> CpuKernels | None:
    """Return the choice that `CpuKernels.record` described; None where this process does not have it."""
    products, attention = record.get("products"), record.get("attention")
    # Runs of before there was a choice multiplied rounded operands by torch.
    compiled, rounded = record.get("compiled", "none"), record.get("rounded", "torch")
    half = record.get("half", "torch")
    known = (
        products in get_args(Products)
        and attention in get_args(Attention)
        and rounded in get_args(Rounded)
        and half in get_args(Half)
    )
    if not known or (products == "onednn" and not HAS_ONEDNN):
        return None
    if attention == "compiled" and compiled == "none":
        return None
    return CpuKernels(products, attention, compiled, rounded, half)  # type: ignore[arg-type]


class Process:
    """The choice of this process, which is oneDNN and own attention until `use` is called.

    Read it where rows are computed: thousands of times in a step.
    """

    kernels = CpuKernels()
    library: ClassVar[Library | None] = None
    """The compiled file; None where Python computes what is in it."""
    weight_copies: ClassVar[dict[tuple[int, torch.Size], Tensor] | None] = None
    """Copies in the format of products, by address and shape, inside `weights_unchanged`."""


def in_use() -> CpuKernels:
    """Return the choice of this process."""
    return Process.kernels


def use(kernels: CpuKernels) -> None:
    """Let the products and attention of this process be computed so from now on.

    Raises:
        BuildError: The compiled file is asked for, and is not there.
    """
    Process.kernels = kernels
    Process.library = library() if kernels.compiled != "none" else None


@contextmanager
def using(kernels: CpuKernels) -> Iterator[None]:
    """Let products and attention be computed so inside the context."""
    before = in_use()
    use(kernels)
    try:
        yield
    finally:
        use(before)


def compiled_for(*operands: Tensor) -> Library | None:
    """Return the library where this process uses it and it computes with these operands: fp32 tensors on a CPU."""
    if Process.library is None:
        return None
    # Fake tensors and other subclasses have no numbers at their address.
    plain = all(
        type(t) in (Tensor, Parameter) and t.dtype == torch.float32 and not t.is_cuda for t in operands
    )
    return Process.library if plain else None


def rounding_for(*operands: Tensor) -> Library | None:
    """Return `compiled_for` where this process rounds the operands of products to bf16 in the compiled file."""
    return compiled_for(*operands) if Process.kernels.rounding else None


@contextmanager
def weights_unchanged() -> Iterator[None]:
    """Keep the copy of each weight in the format of products, where that is not its own, until the end of the context.

    No weight may change or be freed inside: a rollout multiplies by all of them for every token.
    """
    before, Process.weight_copies = Process.weight_copies, {}
    try:
        yield
    finally:
        Process.weight_copies = before


def rounded(operand: Tensor) -> Tensor:
    """Return an operand rounded to bf16, which is in fp32 again where MKL multiplies it."""
    return operand.bfloat16().float() if Process.kernels.rounded == "mkl" else operand.bfloat16()


def rounded_weight(weight: Tensor) -> Tensor:
    """Return `rounded` of a weight, which is computed once inside `weights_unchanged`."""
    return _kept(weight, lambda: rounded(weight))


def weight_as(dtype: torch.dtype, weight: Tensor) -> Tensor:
    """Return a weight in the format of products, which is converted once inside `weights_unchanged`."""
    return weight if weight.dtype == dtype else _kept(weight, lambda: weight.to(dtype))


def _kept(weight: Tensor, converted: Callable[[], Tensor]) -> Tensor:
    """Return the weight that products read, of which a run has one kind."""
    copies = Process.weight_copies
    if copies is None:
        return converted()
    key = weight.data_ptr(), weight.shape
    if key not in copies:
        copies[key] = converted()
    return copies[key]


def is_widened(operand: Tensor) -> bool:
    """Return whether layers compute with this tensor of a CPU, which is in bf16, in fp32, and round results once."""
    return operand.dtype == torch.bfloat16 and Process.kernels.half == "fp32" and operand.device.type == "cpu"
