import time

import pytest
import torch

from mcore_rl.obs.metrics import reduced
from mcore_rl.obs.timing import Timers

CPU = torch.device("cpu")


def test_a_phase_counts_every_time_it_is_entered_until_it_is_taken():
    timers = Timers(CPU)
    for _ in range(2):
        with timers.phase("data"):
            time.sleep(0.02)
    with timers.phase("optimizer"):
        time.sleep(0.01)
    metrics = reduced(timers.take())
    assert 0.04 <= metrics["time/data_s"] < 0.4
    assert 0.01 <= metrics["time/optimizer_s"] < 0.2
    assert timers.take() == []


def test_a_phase_that_fails_is_counted_too():
    timers = Timers(CPU, synchronise=True)
    with pytest.raises(KeyError), timers.phase("data"):
        time.sleep(0.01)
        raise KeyError
    assert reduced(timers.take())["time/data_s"] >= 0.01


def test_a_phase_that_no_metric_documents_is_refused_when_entered():
    with pytest.raises(ValueError, match="time/lunch_s"), Timers(CPU).phase("lunch"):
        pytest.fail("entered")
