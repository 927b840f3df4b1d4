import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_rl.errors import HUNG_STATUS
from mcore_rl.megatron.platform import stop
from mcore_rl.workers.failures import FAILURES, first_cause
from mcore_rl.workers.flight_recorder import ENTRIES, FILE, PREFIX, SIZE, arm, dump
from mcore_rl.workers.launcher import free_port
from mcore_rl.workers.watchdog import Limits, Watchdog
from tests.ranks import forkserver

NAMES = (SIZE[0], "TORCH_NCCL_DUMP_ON_TIMEOUT", FILE[0])


def hang(rank, errors, environment):
    """A rank of two, of which the second never enters the collective for which the first waits."""
    os.environ.update(environment)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    arm()
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1], group_desc="a pair")
    dist.all_reduce(torch.ones(1))
    # Rank 0, which would fail when its peer is gone, reaches its limit long before the peer does.
    limit_s = 1.0 + 4.0 * rank
    with Watchdog(Limits(start_s=limit_s, step_s=limit_s, pause_s=limit_s), rank):
        if rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(7), group=pair)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (*SIZE, *FILE, NAMES[1], FAILURES):
        monkeypatch.setenv(name, "")  # so that what `arm` sets is taken back
        monkeypatch.delenv(name)


def test_the_record_goes_beside_the_logs_of_the_attempt_and_the_users_settings_stay(tmp_path, monkeypatch):
    arm()
    assert not any(name in os.environ for name in NAMES), "nobody collects"
    monkeypatch.setenv(FAILURES, str(tmp_path / "logs/12.0/failures"))
    monkeypatch.setenv(SIZE[1], "7")
    arm()
    file = f"{tmp_path}/logs/12.0/collectives_of_rank_"
    assert [os.environ.get(name) for name in (*NAMES, SIZE[1])] == [None, "1", file, "7"]
    monkeypatch.delenv(SIZE[1])
    arm()
    assert os.environ[SIZE[0]] == str(ENTRIES)


def test_without_a_process_group_nothing_is_written(tmp_path, monkeypatch):
    stop()  # the group of an earlier test in this process
    monkeypatch.setenv(FAILURES, str(tmp_path / "failures"))
    arm()
    assert dump(0) == "" and not list(tmp_path.iterdir())


@pytest.mark.full
def test_ranks_that_hang_leave_files_in_which_torchs_reader_finds_the_rank_that_is_missing(tmp_path):
    """Rank 1 never enters the collective for which rank 0 waits; the reader is the command of the message."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {FAILURES: str(tmp_path / "failures")}
    files = [tmp_path / f"errors_{rank}" for rank in range(2)]
    ranks = [
        forkserver().Process(target=hang, args=(rank, files[rank], shared | {"RANK": str(rank)})) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    errors = [file.read_text() for file in files]
    assert [rank.exitcode for rank in ranks] == [HUNG_STATUS] * 2, errors
    file = tmp_path / f"{PREFIX}0"
    assert f"The last collectives: {file} (" in errors[0]
    cause = first_cause(tmp_path / "failures")
    assert cause is not None and "The last collectives: " in cause.headline
    command = re.search(r"\(python (-m \S+ \S+ --prefix \S+) compares the ranks\)", errors[0])
    assert command is not None
    found = subprocess.run([sys.executable, *command[1].split()], capture_output=True, text=True, cwd=Path("/")).stderr
    lines = [line.split(" - ")[-1].strip() for line in found.splitlines()]
    assert "missing ranks: {1}" in found and "input sizes: [[7]]" in found, lines
