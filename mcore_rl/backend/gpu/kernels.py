"""The choice of kernels in Triton; the modules that hold them are imported where a run asks for them only."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcore_rl.backend.patches.versions import has_module
from mcore_rl.errors import ConfigError

Name = Literal["logprobs", "routing", "experts"]
"""A kernel, as `platform.triton_kernels` names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitKernels:
    """Functions of `gpu.logprobs`, which read logits without storing them."""

    local_sums: Callable[..., tuple[Tensor, Tensor]]
    """Return the highest logit of each row and three sums, as `parallel.vocab` adds them up over ranks."""
    gradient: Callable[..., Tensor]
    """Return the gradient of the logits of some rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterKernels:
    """Functions of `gpu.routing`."""

    route: Callable[..., tuple[Tensor, Tensor]]
    """Return gates and map of the chosen experts, as Megatron's `topk_routing_with_score_function` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertKernels:
    """Functions of `gpu.experts`."""

    swiglu_experts: Callable[..., Tensor]
    """Return the results of experts with SwiGLU for rows sorted by expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels of a run; None: torch computes it."""

    logprobs: LogitKernels | None = None
    routing: RouterKernels | None = None
    experts: ExpertKernels | None = None


NONE = Kernels()


class Tile(NamedTuple):
    """The block of a result that one program computes, and how it is compiled."""

    rows: int
    columns: int
    depth: int
    """Numbers of a row that are multiplied at once."""
    num_warps: int
    num_stages: int


def load_kernels(names: Sequence[Name], device: torch.device) -> Kernels:
    """Return the kernels of these names; without any, Triton is not imported.

    Raises:
        ConfigError: There is no GPU, unless Triton interprets its kernels (TRITON_INTERPRET=1), or Triton is not
            installed.
    """
    if not names:
        return NONE
    asked = f"platform.triton_kernels={list(names)}"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"{asked} needs CUDA, and torch sees no GPU. Set platform.triton_kernels=[].")
    if not has_module("triton"):
        raise ConfigError(
            f"{asked} needs the package triton, which CUDA builds of torch bring along, and it is not installed. "
            "Install it, or set platform.triton_kernels=[]."
        )
    found: dict[str, Any] = {name: import_module(f"mcore_rl.backend.gpu.{name}").KERNELS for name in names}
    return Kernels(**found)
