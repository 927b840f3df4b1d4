"""Peak FLOP/s of a device, the denominator of `train/mfu`."""

import time
from typing import Literal

import torch

from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import known_device

Precision = Literal["fp32", "bf16", "fp8"]


def peak_flops(
    device: torch.device, precision: Precision, configured_tflops: float | Literal["auto"]
) -> float | None:
    """Return the peak FLOP/s of the device: as configured, else by the GPU's name, else measured (~0.2 s). None for a
    CPU, because a measurement would only show how much other processes left of it at the moment.
    """
    if configured_tflops != "auto":
        return configured_tflops * 1e12
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    known = known_peak_tflops(name, precision)
    if known is not None:
        return known * 1e12
    if precision == "fp8":
        raise ConfigError(f"the fp8 peak of {name} is not known: set log.peak_tflops to its dense TFLOP/s")
    return measured_peak_flops(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def known_peak_tflops(device_name: str, precision: Precision) -> float | None:
    """Return the peak of the device with this CUDA name (planning/device.py); None if it is unknown."""
    device = known_device(device_name)
    return None if device is None else device.peak_tflops.get(precision)


def measured_peak_flops(device: torch.device, dtype: torch.dtype, budget_s: float = 0.2) -> float:
    """Return the FLOP/s of the fastest square matrix product within `budget_s`, with the threads of this process."""
    size = 8192 if device.type == "cuda" else 1024
    # A separate generator: every start measures, and must not change the run's random numbers for dropout.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    _product_s(left, right)  # The first product also chooses and loads its kernel.
    best_s = _product_s(left, right)
    end_s = time.perf_counter() + budget_s
    while time.perf_counter() < end_s:
        best_s = min(best_s, _product_s(left, right))
    return 2 * size**3 / best_s


def _product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    start_s = time.perf_counter()
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - start_s
