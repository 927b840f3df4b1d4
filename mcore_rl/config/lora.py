"""The section `lora`: low-rank adapters, trained instead of the model's weights (arXiv 2106.09685)."""

import math
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.section import Section, Text

Rank = Annotated[int, Field(gt=0, le=10_000)]
Target = Literal["attention", "mlp", "shared_experts", "experts"]
TARGETS: tuple[Target, ...] = ("attention", "mlp", "shared_experts", "experts")
"""Modules that may have adapters, in the order in which they are reported."""


class LoraConfig(Section):
    """Low-rank adapters: each target matrix W becomes W + scale * B A, and only A and B are trained."""

    rank: Rank | None = None
    """Rows of A and columns of B; `none`: no adapters, the whole model is trained."""
    alpha: PositiveFloat = 32.0
    """The scale is `alpha` divided by the rank of the adapter."""
    rslora: bool = False
    """The scale is `alpha` divided by the square root of the rank (arXiv 2312.03732)."""
    targets: tuple[Target, ...] | Literal["auto"] = "auto"
    """Modules that get adapters: the projections of `attention`, the `mlp` of dense layers, `shared_experts`, and the
    routed `experts`, with separate adapters for each expert; `auto`: all that the model has."""
    expert_rank: Rank | Literal["auto"] = "auto"
    """Rank in each routed expert; `auto`: `rank` divided by the number of experts per token, at least 1."""
    expert_gate_up: Literal["fused", "split"] = "fused"
    """Gate and up-projection of a routed expert share a single A (`fused`, as PEFT's `target_parameters`), or each has
    its own (`split`, as PEFT's modules for each expert)."""

    load: Text | None = None
    """Folder, in the format of the peft library, with adapters to start from, which must have these targets, ranks and
    scales; `none`: new adapters, or the adapters in `checkpoint.load`."""

    def targets_in(self, model: ModelConfig) -> tuple[Target, ...]:
        """Return the modules of `model` that get adapters."""
        if self.rank is None:
            return ()
        return present(model) if self.targets == "auto" else self.targets

    def rank_of(self, target: Target, model: ModelConfig) -> int:
        """Return the rank of the adapters of `target`."""
        assert self.rank is not None
        if target != "experts":
            return self.rank
        return max(1, self.rank // model.moe.top_k) if self.expert_rank == "auto" else self.expert_rank

    def scale_of(self, rank: int) -> float:
        """Return the factor on B A for adapters of this rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @cached_property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank is not None


def present(model: ModelConfig) -> tuple[Target, ...]:
    """Return the kinds of modules that the model's layers contain."""
    has: dict[Target, bool] = {
        "attention": True,
        "mlp": not all(model.moe_layers),
        "shared_experts": model.is_moe and model.moe.shared_experts > 0,
        "experts": model.is_moe,
    }
    return tuple(target for target in TARGETS if has[target])
