"""Which library computes products and attention of this process on a CPU, and whether the compiled file does layers.

Like the number of threads this belongs to the process: layers, Megatron's patched functions and backward passes read it
where they compute. It decides the order of sums, so that a run records it and a resume takes what was recorded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether torch was built with oneDNN, and gives its linear layer by itself."""
Products = Literal["mkl", "onednn", "bf16"]
Attention = Literal["blocks", "sdpa", "compiled"]
Rounded = Literal["torch", "compiled"]
NAMES = {
    "mkl": "torch's products (MKL)",
    "onednn": "oneDNN's products",
    "bf16": "products of operands rounded to bf16",
    "blocks": "own attention",
    "sdpa": "torch's attention",
    "compiled": "compiled attention",
}
"""The words of a log for each choice."""


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The choice; fields as in PlatformConfig."""

    products: Products = "onednn" if HAS_ONEDNN else "mkl"
    attention: Attention = "blocks"
    compiled: str = "none"
    """Identity of the compiled file's build; "none" where Python computes what is in it."""
    rounded: Rounded = "torch"
    """Who multiplies operands that are rounded to bf16, with `products="bf16"`."""

    def describe(self) -> str:
        """Return the choice in words, for a log."""
        compiled = "compiled layers" if self.compiled != "none" else "no compiled layers"
        products = f"compiled {NAMES['bf16']}" if self.rounds_in_compiled else NAMES[self.products]
        return f"{products}, {NAMES[self.attention]}, {compiled}"

    @property
    def rounds_in_compiled(self) -> bool:
        """Whether products round their operands to bf16 in the compiled file."""
        return self.products == "bf16" and self.rounded == "compiled"

    def record(self) -> dict[str, str]:
        """Return the choice as run.json has it."""
        return asdict(self)


def from_record(record: Mapping[str, str]) -> CpuKernels | None:
    """Return the choice that `CpuKernels.record` described; None where this process does not have it."""
    products, attention = record.get("products"), record.get("attention")
    # Runs of before there was a choice multiplied rounded operands by torch.
    compiled, rounded = record.get("compiled", "none"), record.get("rounded", "torch")
    known = (
        products in get_args(Products) and attention in get_args(Attention) and rounded in get_args(Rounded)
    )
    if not known or (products == "onednn" and not HAS_ONEDNN):
        return None
    if attention == "compiled" and compiled == "none":
        return None
    return CpuKernels(products, attention, compiled, rounded)  # type: ignore[arg-type]


class Process:
    """The choice of this process, which is oneDNN and own attention until `use` is called.

    Read it where rows are computed: thousands of times in a step.
    """

    kernels = CpuKernels()
    rounded_weights: ClassVar[dict[tuple[int, torch.Size], Tensor] | None] = None
    """Rounded copies by address and shape inside `weights_unchanged`."""


def in_use() -> CpuKernels:
    """Return the choice of this process."""
    return Process.kernels


def use(kernels: CpuKernels) -> None:
    """Let the products and attention of this process be computed so from now on."""
    Process.kernels = kernels


@contextmanager
def using(kernels: CpuKernels) -> Iterator[None]:
    """Let products and attention be computed so inside the context."""
    before = in_use()
    use(kernels)
    try:
        yield
    finally:
        use(before)


@contextmanager
def weights_unchanged() -> Iterator[None]:
    """Keep the rounded copy of each weight, where products are of bf16, until the end of the context.

    No weight may change or be freed inside: a rollout multiplies by all of them for every token.
    """
    before, Process.rounded_weights = Process.rounded_weights, {}
    try:
        yield
    finally:
        Process.rounded_weights = before


def rounded_weight(weight_OI: Tensor) -> Tensor:
    """Return a weight rounded to bf16, once inside `weights_unchanged`."""
    copies = Process.rounded_weights
    if copies is None:
        return weight_OI.bfloat16()
    key = weight_OI.data_ptr(), weight_OI.shape
    if key not in copies:
        copies[key] = weight_OI.bfloat16()
    return copies[key]
