"""Adam for machines without TransformerEngine and apex, in the form that Megatron's optimizer expects of theirs."""

from collections.abc import Callable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101, or Adam with L2 if not `adam_w_mode`) by torch's fused kernel.

    The step count lives in the parameter group and the state is `exp_avg` and `exp_avg_sq` only, as with
    TransformerEngine's and apex's FusedAdam, so that checkpoints are the same. torch.optim.AdamW keeps a step
    per parameter, which Megatron's DistributedOptimizer cannot load into a fresh optimizer or into a rank that
    owns no parameter (its `len(steps) == 1` assertion).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable, "for CUDA graphs, which need TransformerEngine's or apex's"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    def initialize_state(self, param: torch.Tensor, *_: Any) -> None:
        """Set the moments of `param` to zero, in fp32 like the main parameters."""
        zeros = torch.zeros_like(param, dtype=torch.float32)
        self.state[param].update(exp_avg=zeros, exp_avg_sq=zeros.clone())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, once."""
        assert closure is None
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            # Also for a group that is empty on this rank: the count is saved and must agree between ranks.
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if "exp_avg" not in self.state[param]:
                    self.initialize_state(param)
            step = torch.full((), float(group["step"]), device=params[0].device)
            fused(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [step] * len(params),
                amsgrad=False,
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
