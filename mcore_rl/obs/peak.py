"""Peak FLOP/s of a device, of which `train/mfu` is a fraction."""

import re
import time
from typing import Literal

import torch

from mcore_rl.backend.cpu.products import product
from mcore_rl.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp8"]

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "V100": {"fp32": 15.7},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "A800": {"bf16": 312.0, "fp32": 19.5},
    "A10": {"bf16": 125.0, "fp32": 31.2},
    "A10G": {"bf16": 70.0, "fp32": 35.0},
    "A40": {"bf16": 149.7, "fp32": 37.4},
    "RTX A6000": {"bf16": 154.8, "fp32": 38.7},
    "L4": {"bf16": 121.0, "fp8": 242.5, "fp32": 30.3},
    "L40": {"bf16": 181.0, "fp8": 362.0, "fp32": 90.5},
    "L40S": {"bf16": 362.0, "fp8": 733.0, "fp32": 91.6},
    "RTX 3090": {"bf16": 71.0, "fp32": 35.6},
    "RTX 4090": {"bf16": 165.2, "fp8": 330.3, "fp32": 82.6},
    "RTX 5090": {"bf16": 209.5, "fp8": 419.0, "fp32": 104.8},
    "H20": {"bf16": 148.0, "fp8": 296.0, "fp32": 44.0},
    "H100 PCIe": {"bf16": 756.5, "fp8": 1513.0, "fp32": 51.2},
    "H100 NVL": {"bf16": 835.5, "fp8": 1671.0, "fp32": 60.0},
    "H100": {"bf16": 989.4, "fp8": 1978.9, "fp32": 66.9},
    "H800": {"bf16": 989.4, "fp8": 1978.9, "fp32": 66.9},
    "H200": {"bf16": 989.4, "fp8": 1978.9, "fp32": 66.9},
    "H200 NVL": {"bf16": 835.5, "fp8": 1671.0, "fp32": 60.0},
    "GH200": {"bf16": 989.4, "fp8": 1978.9, "fp32": 66.9},
    "B200": {"bf16": 2250.0, "fp8": 4500.0, "fp32": 75.0},
    "GB200": {"bf16": 2500.0, "fp8": 5000.0, "fp32": 80.0},
    "B300": {"bf16": 2250.0, "fp8": 4500.0, "fp32": 75.0},
    "GB300": {"bf16": 2500.0, "fp8": 5000.0, "fp32": 80.0},
}
"""TFLOP/s of dense matrix products in NVIDIA's data sheets (half of the numbers "with sparsity"; fp32 without TF32).
A name is that of the SXM module where there is one."""


def peak_flops(
    device: torch.device, precision: Precision, configured_tflops: float | Literal["auto"]
) -> float:
    """Return the peak FLOP/s of the device: as configured, else by its name, else measured (~0.2 s)."""
    if configured_tflops != "auto":
        return configured_tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = known_peak_tflops(name, precision)
    if known is not None:
        return known * 1e12
    if precision == "fp8":
        raise ConfigError(f"the fp8 peak of {name} is not known: set log.peak_tflops to its dense TFLOP/s")
    return measured_peak_flops(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def known_peak_tflops(device_name: str, precision: Precision) -> float | None:
    """Return the peak of the longest entry whose words are all in the name; None without one, and for a MIG slice."""
    words = set(re.split(r"[\s-]+", device_name))
    fits = [name for name in PEAK_TFLOPS if set(name.split()) <= words]
    if not fits or "MIG" in words:
        return None
    return PEAK_TFLOPS[max(fits, key=lambda name: len(name.split()))].get(precision)


def measured_peak_flops(device: torch.device, dtype: torch.dtype, budget_s: float = 0.2) -> float:
    """Return the FLOP/s of the fastest square matrix product within `budget_s`, with the threads of this process."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    _product_s(left, right)  # The first product also chooses and loads its kernel.
    best_s = _product_s(left, right)
    end_s = time.perf_counter() + budget_s
    while time.perf_counter() < end_s:
        best_s = min(best_s, _product_s(left, right))
    return 2 * size**3 / best_s


def _product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    start_s = time.perf_counter()
    product(left, right)  # the product of our layers: on some CPUs twice as fast as torch's
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - start_s
