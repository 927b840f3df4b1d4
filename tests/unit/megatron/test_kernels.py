"""Packed sequences by one call, on an emulated GPU whose kernel is stood in for; CPUs have none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_rl.megatron.kernels import has_kernel, kernel_takes
from mcore_rl.workers.launcher import free_port
from tests.emulated_machine import emulated

REPOSITORY = Path(__file__).parents[3]
BF16_TOLERANCE = 0.03
"""Largest difference from the closed form in float64: inputs are exact, outputs of up to 4 are rounded to 8 bits."""
CALLS = {
    "grouped queries": 1, "values narrower than keys": 1, "a window": 1, "sinks": 1, "sinks and a window": 1,
    "heads of a width that kernels do not have": 0, "fp32": 0,
}  # fmt: skip


def test_a_cpu_has_no_kernel() -> None:
    heads = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    assert not has_kernel()
    assert not kernel_takes(heads, 8)


@pytest.mark.full
def test_on_an_emulated_gpu_packed_sequences_take_one_call_where_the_kernel_can() -> None:
    done = emulated("cuda", "tests.emulated_packed:attention")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rotation_difference"] == 0.0
    assert found["log"].endswith("packed sequences by torch's varlen_attn")
    assert found["doctor"]["attention of packed sequences in one call (torch's varlen_attn)"]
    calls = {name: case["calls"] for name, case in found["cases"].items()}
    assert calls == CALLS
    for name, case in found["cases"].items():
        assert case["waits"] == {}, name
        assert max(case["differences"]) <= (BF16_TOLERANCE if name != "fp32" else 1e-5), name


@pytest.mark.full
def test_on_context_parallel_ranks_too_with_the_keys_of_each_chunk(tmp_path: Path) -> None:
    """Sequences and gradients of up to 4 times the length: those of keys are sums over more queries."""
    command = [sys.executable, "-m", "tests.emulated_machine", "--cuda"]
    command += ["tests.emulated_packed:context_parallel", str(tmp_path)]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | world | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-3000:] for text in errors)
    for rank in ("0", "1"):
        found = json.loads((tmp_path / rank).read_text())
        assert {name: case["calls"] for name, case in found.items()} == CALLS
        for name, case in found.items():
            assert max(case["differences"]) <= (2 * BF16_TOLERANCE if name != "fp32" else 1e-5), (name, case)
