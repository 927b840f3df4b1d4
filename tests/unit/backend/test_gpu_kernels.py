"""Kernels in Triton that a machine cannot have are refused before a model is built."""

import sys
from types import ModuleType

import pytest
import torch

from mcore_rl.backend.gpu import kernels
from mcore_rl.backend.gpu.kernels import NONE, LogitKernels, load_kernels
from mcore_rl.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_none_are_loaded_where_none_are_named() -> None:
    assert load_kernels((), CPU) is NONE and NONE.logprobs is None


def test_kernels_without_a_gpu_or_without_triton_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ConfigError, match=r"triton_kernels=\['logprobs'\] needs CUDA, and torch sees no GPU. Set"
    ):
        load_kernels(("logprobs",), CPU)
    monkeypatch.setattr(kernels, "has_module", lambda name: False)
    with pytest.raises(
        ConfigError, match=r"needs the package triton, .* is not installed. Install it, or set"
    ):
        load_kernels(("logprobs",), CUDA)


def test_kernels_are_those_of_the_module_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mcore_rl.backend.gpu.logprobs")
    module.KERNELS = LogitKernels(local_sums=min, gradient=max)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "has_module", lambda name: name == "triton")
    assert load_kernels(("logprobs",), CUDA).logprobs is module.KERNELS
