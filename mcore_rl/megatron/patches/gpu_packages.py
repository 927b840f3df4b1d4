"""The packages for GPUs that are usable on this machine; unusable packages are hidden from Megatron.

Megatron would use TransformerEngine and apex even if they cannot compute, and does not start if an import fails.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.storage.checkpoint import megatron_version


def has_module(name: str) -> bool:
    """Return whether the module `name` can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def as_experts_entry(experts: type) -> Any:
    """Return `experts` as a spec provider's `grouped_mlp_modules` does: in a pair, or since 0.19 as a builder."""
    return (experts, None) if megatron_version() == "0.16" else experts


def with_moe_layer(mlp: Any, moe_layer: type) -> Any:
    """Return the spec of a Mixture-of-Experts layer with a different class; since 0.19 the spec is a partial."""
    if megatron_version() == "0.16":
        mlp.module = moe_layer
        return mlp
    return functools.partial(moe_layer, *mlp.args, **mlp.keywords)


def writer_choice() -> dict[str, str]:
    """Return the arguments by which a checkpoint strategy plans for Megatron's own writer, not 0.19's default."""
    return {} if megatron_version() == "0.16" else {"async_strategy": "mcore"}


PACKAGES: dict[str, tuple[str, ...]] = {
    "transformer_engine": ("transformer_engine", "transformer_engine_torch"),
    "apex": ("apex", "amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"),
}
"""The modules at the top level of each package."""
USED = {"transformer_engine": ("transformer_engine.pytorch",), "apex": ("apex.optimizers", "amp_C")}
"""Modules of a package that have to be importable for it to be usable."""
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
"""Errors of importing a package that was built for another torch, CUDA or compiler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPackages:
    """The hardware and packages that the choice of patches depends on, apart from Megatron's version."""

    has_cuda: bool
    """Whether torch sees a GPU."""
    has_te: bool
    """Whether TransformerEngine is installed and can be imported, and there is a GPU for it."""
    has_apex: bool
    """Whether NVIDIA's apex is usable, not the package of that name on PyPI."""
    unusable: Mapping[str, str]
    """For each package that is installed but hidden, the reason."""


def find_packages() -> GpuPackages:
    """Look for the packages, before Megatron is imported, and hide those that are installed but not usable."""
    has_cuda = torch.cuda.is_available()
    unusable = {}
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            continue
        reason = _import_error(package) if has_cuda else "it computes on GPUs only, and torch sees none"
        if reason:
            unusable[package] = reason
            for root in PACKAGES[package]:
                for name in [name for name in sys.modules if name.startswith(f"{root}.")]:
                    del sys.modules[name]
                sys.modules[root] = None  # type: ignore[assignment]  # an import of it fails
    usable = {name: importlib.util.find_spec(name) is not None for name in PACKAGES}
    return GpuPackages(
        has_cuda=has_cuda, has_te=usable["transformer_engine"], has_apex=usable["apex"], unusable=unusable
    )


def _import_error(package: str) -> str:
    for module in USED[package]:
        try:
            importlib.import_module(module)
        except IMPORT_ERRORS as error:
            return f"import {module}: {type(error).__name__}: {error}"
    return ""
