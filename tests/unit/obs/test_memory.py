import torch

from mcore_rl.obs.memory import memory_metrics
from mcore_rl.obs.metrics import reduced

MIB = 2**20


def test_memory_rises_with_what_is_held_and_its_peak_stays():
    before = reduced(memory_metrics(torch.device("cpu")))
    held = torch.ones(200 * MIB, dtype=torch.uint8)
    during = reduced(memory_metrics(torch.device("cpu")))
    del held
    after = reduced(memory_metrics(torch.device("cpu")))
    assert during["memory/resident_bytes"] - before["memory/resident_bytes"] > 180 * MIB
    assert during["memory/resident_bytes"] - after["memory/resident_bytes"] > 180 * MIB
    # The kernel brings its counters up to date a few pages late.
    assert after["memory/peak_resident_bytes"] > during["memory/resident_bytes"] - MIB
