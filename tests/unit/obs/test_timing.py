import pytest
import torch

from mcore_rl.obs.metrics import reduced
from mcore_rl.obs.timing import Timers

CPU = torch.device("cpu")


def set_clock(monkeypatch, *ticks_s):
    """Have the clock show these times in turn."""
    monkeypatch.setattr("mcore_rl.obs.timing.time.perf_counter", iter(ticks_s).__next__)


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
