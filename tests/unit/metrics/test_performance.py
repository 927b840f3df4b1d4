import mmap

import pytest
import torch

from mcore_rl.metrics.metrics import reduced
from mcore_rl.metrics.performance import Timers, memory_metrics

CPU = torch.device("cpu")
MIB = 2**20


def set_clock(monkeypatch, *ticks_s):
    """Have the clock show these times in turn."""
    monkeypatch.setattr("mcore_rl.metrics.performance.time.perf_counter", iter(ticks_s).__next__)


def test_a_phase_counts_every_time_it_is_entered_until_it_is_taken(monkeypatch):
    set_clock(monkeypatch, 1.0, 1.25, 2.0, 2.5, 3.0, 7.0)
    timers = Timers(CPU)
    for _ in range(2):
        with timers.phase("data"):
            pass
    with timers.phase("optimizer"):
        pass
    metrics = reduced(timers.take())
    assert (metrics["time/data_s"], metrics["time/optimizer_s"]) == (0.75, 4.0)
    assert timers.take() == []


def test_a_phase_that_fails_is_counted_too(monkeypatch):
    set_clock(monkeypatch, 1.0, 1.5)
    timers = Timers(CPU, synchronise=True)
    with pytest.raises(KeyError), timers.phase("data"):
        raise KeyError
    assert reduced(timers.take())["time/data_s"] == 0.5


def test_a_phase_that_no_metric_documents_is_refused_when_entered():
    with pytest.raises(ValueError, match="time/lunch_s"), Timers(CPU).phase("lunch"):
        pytest.fail("entered")


def test_memory_rises_with_what_is_held_and_its_peak_stays():
    before = reduced(memory_metrics(CPU))
    # Of the kernel itself: a process with much behind it may have so large a gap in its heap.
    pages = mmap.mmap(-1, 200 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    during = reduced(memory_metrics(CPU))
    del held
    pages.close()
    after = reduced(memory_metrics(CPU))
    assert during["memory/resident_bytes"] - before["memory/resident_bytes"] > 180 * MIB
    assert during["memory/resident_bytes"] - after["memory/resident_bytes"] > 180 * MIB
    # The kernel brings its counters up to date a few pages late.
    assert after["memory/peak_resident_bytes"] > during["memory/resident_bytes"] - MIB
