"""Which library computes products and attention of this process on a CPU, and whether the compiled file does layers.

Like the number of threads this belongs to the process: layers, Megatron's patched functions and backward passes read it
where they compute. It decides the order of sums, so that a run records it and a resume takes what was recorded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether torch was built with oneDNN, and gives its linear layer by itself."""
Products = Literal["mkl", "onednn"]
Attention = Literal["blocks", "sdpa"]
NAMES = {
    "mkl": "torch's products (MKL)",
    "onednn": "oneDNN's products",
    "blocks": "own attention",
    "sdpa": "torch's attention",
}
"""The words of a log for each choice."""


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The choice; fields as in PlatformConfig."""

    products: Products = "onednn" if HAS_ONEDNN else "mkl"
    attention: Attention = "blocks"
    compiled: str = "none"
    """What identifies the build of the compiled file; "none" where Python computes what is in it."""

    def describe(self) -> str:
        """Return the choice in words, for a log."""
        compiled = "compiled layers" if self.compiled != "none" else "no compiled layers"
        return f"{NAMES[self.products]}, {NAMES[self.attention]}, {compiled}"

    def record(self) -> dict[str, str]:
        """Return the choice as run.json has it."""
        return asdict(self)


def from_record(record: Mapping[str, str]) -> CpuKernels | None:
    """Return the choice that `CpuKernels.record` described; None where this process does not have it."""
    products, attention = record.get("products"), record.get("attention")
    known = products in get_args(Products) and attention in get_args(Attention)
    if not known or (products == "onednn" and not HAS_ONEDNN):
        return None
    return CpuKernels(products, attention, record.get("compiled", "none"))  # type: ignore[arg-type]


class _Process:
    """The choice of this process, which is oneDNN and own attention until `use` is called."""

    kernels = CpuKernels()


def in_use() -> CpuKernels:
    """Return the choice of this process."""
    return _Process.kernels


def use(kernels: CpuKernels) -> None:
    """Let the products and attention of this process be computed so from now on."""
    _Process.kernels = kernels


@contextmanager
def using(kernels: CpuKernels) -> Iterator[None]:
    """Let products and attention be computed so inside the context."""
    before = in_use()
    use(kernels)
    try:
        yield
    finally:
        use(before)
