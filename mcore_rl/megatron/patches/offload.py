"""Megatron's hybrid optimizer with a CPU as the device: main memory also serves as the device's memory."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def weights_count_as_on_device(_: Any) -> Callable[..., Any]:
    """Return a `HybridDeviceOptimizer._get_sub_optimizer_param_groups` for weights that are not on a CUDA device.

    As on a GPU, the first weights of the groups up to the fraction are offloaded and the rest are not, and every weight
    has a copy in fp32 that the optimizer updates.
    """

    def sub_groups(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        total = sum(weight.numel() for group in self.param_groups for weight in group["params"])
        offloaded = 0
        host_groups, device_groups = [], []
        host_copy_of: dict[Tensor, Tensor] = {}
        fp32_of: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            on_host, on_device = {**group, "params": []}, {**group, "params": []}
            for weight in group["params"]:
                is_offloaded = offloaded < total * offload_fraction
                copy = weight.detach().clone().float()
                fp32_of[weight] = copy
                if is_offloaded:
                    offloaded += weight.numel()
                    host_copy_of[weight] = copy
                (on_host if is_offloaded else on_device)["params"].append(copy)
            host_groups += [on_host] if on_host["params"] else []
            device_groups += [on_device] if on_device["params"] else []
        weight_of = {copy: weight for weight, copy in host_copy_of.items()}
        return host_groups, device_groups, host_copy_of, weight_of, fp32_of

    return sub_groups
