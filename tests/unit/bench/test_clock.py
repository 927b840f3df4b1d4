"""What every benchmark reports beside its figures."""

import json
import time
from pathlib import Path

import psutil
import pytest

from bench.clock import (
    CONTENDED,
    Clock,
    Others,
    Peaks,
    circumstances,
    circumstances_line,
    contention,
    machine_cpu_s,
    ratio_over_rounds,
    write_results,
)


def test_a_ratio_is_of_the_medians_and_its_quartiles_are_of_the_ratios_of_each_round():
    found = ratio_over_rounds([2.0, 9.0, 3.0, 4.0, 8.0], [1.0, 3.0, 2.0, 1.0, 8.0])
    # Medians 4 and 2; ratios of the rounds 2, 3, 1.5, 4, 1, in order 1, 1.5, 2, 3, 4.
    assert found == {"ratio": 2.0, "ratio_quartiles": [1.5, 3.0]}


def test_contention_is_wall_over_cpu_seconds_of_all_clocks():
    clocks = [Clock(cpu_s=[1.0, 2.0], wall_s=[2.0, 2.0]), Clock(cpu_s=[1.0], wall_s=[4.0])]
    assert contention(clocks) == 8.0 / 4.0


def test_contention_beside_a_disk_is_the_part_of_the_machine_that_others_took(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    others = Others()
    others.add(own_cpu_s=3.0, machine_cpu_s=5.0, wall_s=2.0)  # one of four CPUs is others'
    assert others.contention == pytest.approx(4 / 3)
    others.add(own_cpu_s=1.0, machine_cpu_s=0.9, wall_s=2.0)  # of different clocks: less than ours is nothing
    assert others.contention == pytest.approx(4 / 3.5)


def test_the_machine_works_at_least_as_much_as_this_process():
    machine, own = machine_cpu_s(), time.process_time()
    while time.process_time() < own + 0.2:
        pass
    # The kernel counts the machine's seconds in ticks of 0.01, each CPU's by itself.
    assert machine_cpu_s() - machine >= 0.2 - 0.01 * (1 + (psutil.cpu_count() or 1))


@pytest.mark.full
@pytest.mark.parametrize(("wall_over_cpu", "is_contended"), [(CONTENDED, False), (CONTENDED + 0.01, True)])
def test_a_disturbed_row_is_marked_in_the_file_and_in_words(wall_over_cpu: float, is_contended: bool):
    peaks = Peaks()
    peaks.measure()
    row = circumstances(wall_over_cpu, peaks)
    assert row["is_contended"] is is_contended
    assert row["peak_gflops"] > 1.0
    assert ("never quoted" in circumstances_line(row)) is is_contended


def test_results_name_their_command_and_the_machine(tmp_path: Path):
    write_results(tmp_path / "rl.json", {"rows": {}}, ["--rounds", "2"])
    document = json.loads((tmp_path / "rl.json").read_text())
    assert document["command"] == "python -m bench.rl --rounds 2"
    assert document["rows"] == {}
    assert {"torch", "megatron-core", "machine"} <= set(document["versions"])
