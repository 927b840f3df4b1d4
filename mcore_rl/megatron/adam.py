"""Adam and the norm of gradients for machines without TransformerEngine and apex, with the interface that Megatron's
optimizer expects from them.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "master_param"
"""Name of a weight's fp32 copy among its states, if the optimizer rather than Megatron has it."""


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101, or Adam with L2 if not `adam_w_mode`) by torch's fused kernel.

    The step count lives in the parameter group and the state is `exp_avg` and `exp_avg_sq` only, as with
    TransformerEngine's and apex's FusedAdam, so that checkpoints are the same. torch.optim.AdamW keeps a step
    per parameter, which Megatron's DistributedOptimizer cannot load into a fresh optimizer or into a rank that
    owns no parameter (its `len(steps) == 1` assertion).

    With `master_weights`, as Megatron's precision-aware optimizer sets it, a 16-bit parameter has its fp32 copy among
    the states, moments wait in the given dtypes, and gradients are read from `decoupled_grad`, of any dtype.
    """

    # The functions below the decorator that keeps them out of compiled code: its first call imports torch._dynamo, a
    # fifth of a rank's work before its first step, and no step is compiled.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    _load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

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
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert not capturable, "for CUDA graphs, which need TransformerEngine's or apex's"
        assert master_weight_dtype == torch.float32 and not store_param_remainders, "fp32 copies are whole"
        assert master_weights == use_decoupled_grad, "Megatron sets both or none"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, MAIN: master_weight_dtype}

    def initialize_state(self, param: Tensor, *_: Any) -> None:
        """Set the moments of `param` to zero, and make its fp32 copy if this optimizer has them."""
        for name in MOMENTS:
            self.state[param][name] = torch.zeros_like(param, dtype=self._dtypes[name])
        if self.master_weights:
            self.state[param][MAIN] = param.detach().clone().float()

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Return a state of `param` in fp32: the tensor itself if it is in fp32."""
        state: Tensor = self.state[param][name]
        return state.float()

    def set_scaled_state(self, param: Tensor, name: str, values: Tensor) -> None:
        """Set a state of `param` to fp32 `values`, rounded to its dtype."""
        state = self.state[param]
        if name not in state or state[name].dtype != self._dtypes[name]:
            state[name] = torch.empty_like(param, dtype=self._dtypes[name])
        state[name].copy_(values)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of an optimizer with any of the dtypes."""
        self._load_state_dict(state_dict)
        if not self.master_weights:
            return
        # torch gives each state the dtype of its parameter, in which the fp32 copy would be the parameter again.
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for param, key in zip(params, keys, strict=True):
            for name, values in state_dict["state"].get(key, {}).items():
                self.set_scaled_state(param, name, values)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, once."""
        assert closure is None
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            # Also for a group that is empty on this rank: the count is saved and must agree between ranks.
            group["step"] = int(group.get("step", 0)) + 1
            name = "decoupled_grad" if self.master_weights else "grad"
            params = [param for param in group["params"] if getattr(param, name, None) is not None]
            if not params:
                continue
            for param in params:
                if "exp_avg" not in self.state[param]:
                    self.initialize_state(param)
            settings = {
                "amsgrad": False,
                "lr": float(group["lr"]),
                "beta1": group["betas"][0],
                "beta2": group["betas"][1],
                "weight_decay": group["weight_decay"],
                "eps": group["eps"],
                "maximize": False,
            }
            # The fused kernel reads the count from a tensor and does not change it, so that all parameters can share
            # it.
            step = torch.full((), float(group["step"]), device=params[0].device)
            if self.master_weights:
                for param in params:
                    self._step_in_fp32(fused, param, step, settings)
                continue
            fused(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [step] * len(params),
                **settings,
            )

    def _step_in_fp32(self, fused: Callable[..., None], param: Any, step: Tensor, settings: dict[str, Any]) -> None:
        """Update the fp32 copy of a parameter, then the parameter, so that only a single parameter has moments in fp32
        at a time.
        """
        state = self.state[param]
        moments = [self.get_unscaled_state(param, name) for name in MOMENTS]
        mean, squares = moments
        fused([state[MAIN]], [param.decoupled_grad.float()], [mean], [squares], [], [step], **settings)
        for name, moment in zip(MOMENTS, moments, strict=True):
            self.set_scaled_state(param, name, moment)
        param.copy_(state[MAIN])


def norm_of_tensors(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Replacement for `multi_tensor_l2norm`: the norm of all tensors together, float32 `[1]` on their device.

    The arguments are the kernel's; only the tensors, in one list, are used.
    """
    (tensors,) = tensor_lists
    assert not per_tensor, "Megatron asks for the norm of all"
    # A norm in the gradients' bf16 would have two digits.
    dtype = None if tensors[0].dtype == torch.float32 else torch.float32
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    return torch.linalg.vector_norm(norms, dtype=torch.float32).view(1), None
