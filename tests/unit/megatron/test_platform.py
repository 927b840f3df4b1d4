"""Routes and batches on their way to a GPU, which is emulated; on this CPU nothing travels."""

import json

import pytest
import torch

from mcore_rl.megatron.platform import Ahead, to_device
from tests import emulated_replay
from tests.emulated_machine import emulated


def test_on_a_cpu_tensors_stay_where_they_are_and_are_read_when_they_are_used() -> None:
    tensor, calls = torch.ones(3), []

    def make() -> torch.Tensor:
        calls.append(1)
        return tensor

    assert to_device(tensor, torch.device("cpu")) is tensor
    use = Ahead(torch.device("cpu")).begin(make)
    assert not calls and use() is tensor and len(calls) == 1
    assert emulated_replay.replayed()["events"] == ["read", "forward"] * emulated_replay.ROWS


@pytest.mark.full
def test_on_an_emulated_gpu_routes_travel_before_the_microbatch_in_front_of_them_is_computed() -> None:
    done = emulated("cuda", "tests.emulated_replay:replayed")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ahead = ["forward", "read"] * (emulated_replay.ROWS - 2)
    assert found["events"] == ["read", "read", *ahead, "forward", "forward"]
    assert found["changed_fraction"] == 0.0
    # Gradients are finalized once a step.
    assert found["waits"].keys() <= {"finalize_model_grads.py:finalize_model_grads"}
    assert found["pageable"] == {}
    before_the_wait, after_it, overwritten = found["races"]
    assert "uses what another stream may not have made yet" in before_the_wait
    assert after_it == ""
    assert "overwrites what a copy to the GPU may not have read yet" in overwritten


@pytest.mark.full
def test_on_an_emulated_gpu_an_engines_routes_are_checked_there_and_the_host_waits_once() -> None:
    done = emulated("cuda", "tests.emulated_replay:rollout_routes")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"waits": [1, 1], "devices": ["cuda:0", "cuda:0"], "problems": []}


@pytest.mark.full
def test_on_an_emulated_gpu_routes_in_page_locked_memory_are_read_after_their_copy() -> None:
    done = emulated("cuda", "tests.emulated_replay:kept_routes")
    assert done.returncode == 0, done.stderr[-3000:]
    rows, too_early, num_waits = json.loads(done.stdout.splitlines()[-1])
    assert rows == [[6, 7, 8], [0, 1, 2]]
    assert "uses what a copy from the GPU may not have written yet" in too_early
    assert num_waits == 0  # the read before has waited for all copies
