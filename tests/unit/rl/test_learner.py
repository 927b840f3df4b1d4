"""Sizes of the packed sequences that a policy learns from."""

import pytest

from mcore_rl.backend.cpu.kernels import CpuKernels
from mcore_rl.rl.learner import length_multiple


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (None, 64),
        (CpuKernels("onednn"), 64),
        (CpuKernels("mkl"), 8),
        (CpuKernels("bf16", rounded="torch"), 64),
        (CpuKernels("bf16", rounded="mkl"), 8),
        (CpuKernels("bf16", rounded="compiled"), 8),
    ],
    ids=str,
)
def test_sequences_are_padded_as_far_as_products_gain_by_it(
    kernels: CpuKernels | None, expected: int
) -> None:
    assert length_multiple(kernels) == expected
