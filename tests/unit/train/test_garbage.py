"""Garbage goes when the trainer says so, not when Python has counted enough objects."""

import gc
import weakref

import pytest

from mcore_rl.train.loop import TimedGarbage


class Cycle:
    """Freed by a collection only."""

    def __init__(self) -> None:
        self.itself = self


def cycle() -> "weakref.ref[Cycle]":
    return weakref.ref(Cycle())


def churn() -> None:
    """Make more objects than Python's own thresholds wait for."""
    assert len([[[]] for _ in range(3 * gc.get_threshold()[0])]) > 0


@pytest.mark.full
def test_garbage_waits_for_its_unit_of_work_and_for_pauses() -> None:
    assert gc.isenabled()
    with TimedGarbage(2) as garbage:
        first = cycle()
        churn()
        garbage.unit_done()
        assert first() is not None
        garbage.unit_done()
        assert first() is None
        second = cycle()
        garbage.collect()
        assert second() is None
        assert not gc.isenabled()
    assert gc.isenabled()


def test_without_an_interval_python_collects_as_it_likes() -> None:
    with TimedGarbage(None) as garbage:
        assert gc.isenabled()
        left = cycle()
        garbage.unit_done()
        garbage.collect()
        assert left() is not None
    gc.collect()
