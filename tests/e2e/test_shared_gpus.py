"""Servers on the GPUs of the ranks: the order of a step, the account of memory, and a trainer that is killed in each
state.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.metrics.jsonl import read_records
from tests.e2e.test_resume import running, wait_for_step
from tests.e2e.test_served import ROOT, is_fake_server
from tests.emitted import assert_emitted
from tests.fake_server import GENERATE
from tests.forked import begin_main, run_main, wait_for

STEPS = 4
WORDS = (
    *("mesh.tp=1", "mesh.ep=1", f"train.steps={STEPS}", "train.global_batch=8", "train.eval_interval=none"),
    *("checkpoint.interval=none", "rl.rollout.prompts_per_step=2", "rl.rollout.group_size=4", "replay.kind=none"),
    *("rl.samples.interval=none", "rl.loss.kl_coeff=0", "rl.loss.reference_refresh_rollouts=none"),
    *("rl.engine.kind=vllm", "rl.engine.share_gpus=true", "rl.update.store=host", "rl.engine.probe_tolerance=1e9"),
)
"""A step is a rollout batch with one update. The servers answer from a table."""
ASK = GENERATE["vllm"]
CYCLE = (
    *("/wake_up?tags=weights", "/start_weight_update", "/finish_weight_update", "/wake_up?tags=kv_cache"),
    *("probe", ASK, "/sleep", "train"),
)


def shared_run(
    rl_file: Path, run_dir: Path, *words: str, changes: Sequence[str] = ()
) -> tuple[Any, list[Any], list[str]]:
    """The finished run beside a server in its process, its events with their times, and what the server was misused
    for.
    """
    run_dir.mkdir(exist_ok=True)
    run = run_main("tests.sharing", [*changes, "--", rl_file, *WORDS, f"run_dir={run_dir}", *words])
    found = json.loads((run_dir / "events").read_text())
    return run, found["events"], found["misuses"]


@pytest.mark.full
def test_trainer_and_servers_take_turns_with_the_memory_of_a_gpu(rl_file: Path, tmp_path: Path) -> None:
    """In the order of the table of states, in each step; a save has the memory alone, an evaluation has servers."""
    run_dir = tmp_path / "run"
    run, events, misuses = shared_run(rl_file, run_dir, "checkpoint.interval=2", "train.eval_interval=2")
    assert run.returncode == 0 and misuses == [], run.stderr
    names = [name for name, _ in events]
    evaluation = CYCLE[:-1]
    # The first evaluation is of the first rollout's weights.
    assert names == ["/wake_up?", "/sleep", *CYCLE, *CYCLE, *evaluation, *CYCLE, *CYCLE, *evaluation]
    assert_emitted("rl with servers on the same GPUs", run_dir)
    records = list(read_records(run_dir / "metrics.jsonl"))
    assert sum("servers/sleep_s" in record for record in records) >= STEPS - 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "message"),
    [("state_stays", "the trainer's memory is still there"), ("no_saver", "was started without --enable-sleep-mode")],
)
def test_memory_that_does_not_leave_ends_the_run_by_name(
    change: str, message: str, rl_file: Path, tmp_path: Path
) -> None:
    """The optimizer's state stays on the GPU, or the server only says that it sleeps."""
    run, events, misuses = shared_run(rl_file, tmp_path / "run", changes=[change])
    assert run.returncode == 2 and message in run.stderr, run.stderr
    assert misuses == [] and not {ASK, "/wake_up?tags=weights"} & {name for name, _ in events}


@pytest.mark.full
def test_a_server_that_is_woken_while_the_trainers_bytes_are_there_ends(rl_file: Path, tmp_path: Path) -> None:
    """Where nobody reads how much memory is free."""
    run, events, misuses = shared_run(rl_file, tmp_path / "run", changes=["state_stays", "blind"])
    assert run.returncode == 2 and "0 servers have the weights" in run.stderr, run.stderr
    assert "/wake_up: out of memory" in misuses[0] and ASK not in [name for name, _ in events]


STATES = {
    "start": "/collective_rpc#1",
    "first sleep": "/sleep#1",
    "wake weights": "/wake_up#2",  # the first one is of the server's entrance
    "push": "/update_weights#2",
    "wake keys and values": "/wake_up#3",
    "probe": "probe#3",
    "generate": f"{ASK}#3",
    "sleep": "/sleep#2",
}
"""State -> call in which it hangs while the trainer is killed."""


def says(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


@pytest.mark.full
def test_a_trainer_that_is_killed_in_any_state_leaves_no_server_and_its_next_start_goes_on(
    rl_file: Path, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "run/servers/server_0.log"
    command = json.dumps([sys.executable, str(ROOT / "tests/fake_server.py")])
    words = [rl_file, *WORDS, f"run_dir={run_dir}", f"rl.engine.command={command}", "checkpoint.interval=1"]
    for number, call in enumerate(STATES.values()):
        way = f"rl.engine.transport={('files', 'ipc')[number % 2]}"  # by slots in a push
        hanging = [*words, way, f'rl.engine.args=["--hang","{call}"]']
        killed = begin_main("mcore_rl.programs.rl", hanging, tmp_path / f"out_{number}")
        assert killed.pid is not None
        try:
            wait_for(partial(says, log, f"hangs at {call.partition('#')[0]}"), 120)
            servers = [one for one in psutil.Process(killed.pid).children(recursive=True) if is_fake_server(one)]
            assert servers
        finally:
            os.kill(killed.pid, signal.SIGKILL)
            killed.join()
        _, left = psutil.wait_procs(servers, timeout=60)
        assert not left, call
        text = log.read_text()
        assert "misused" not in text, text
        log.unlink()
    run = run_main("mcore_rl.programs.rl", [*words, "rl.engine.transport=ipc"])
    assert run.returncode == 0 and "misused" not in log.read_text(), run.stderr
    assert (run_dir / "DONE").exists()


@pytest.mark.full
@pytest.mark.parametrize("way", ["files", "ipc"])
def test_four_ranks_start_two_servers_of_two_gpus_and_the_first_of_each_pair_ends_its_own(
    way: str, rl_file: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = json.dumps([sys.executable, str(ROOT / "tests/fake_server.py")])
    words = [rl_file, *WORDS, f"run_dir={run_dir}", f"rl.engine.command={command}", "rl.engine.tensor_parallel=2"]
    words += [f"rl.engine.transport={way}", "mesh.tp=2", "mesh.ep=2", "mesh.dp=auto", "train.steps=2"]
    run = run_main("mcore_rl.programs.rl", words, num_ranks=4)
    assert run.returncode == 0, run.stderr
    status = json.loads((run_dir / "servers/status.json").read_text())
    assert [one["is_serving"] for one in status["servers"]] == [True, True]
    logs = [(run_dir / f"servers/server_{index}.log").read_text() for index in range(2)]
    assert all("--tensor-parallel-size 2" in log and "misused" not in log for log in logs), logs
    assert not [one for one in psutil.Process().children(recursive=True) if is_fake_server(one)]


@pytest.mark.full
def test_a_server_that_is_killed_costs_its_requests_and_is_there_again_in_a_later_rollout(
    rl_file: Path, tmp_path: Path
) -> None:
    """Two servers on the GPUs of two ranks; one is killed in whatever state it is."""
    run_dir = tmp_path / "run"
    command = json.dumps([sys.executable, str(ROOT / "tests/fake_server.py")])
    words = ["rl", rl_file, *WORDS, f"run_dir={run_dir}", f"rl.engine.command={command}", "mesh.tp=2", "mesh.ep=2"]
    with running([*words, "rl.engine.transport=ipc", "train.steps=8"], tmp_path / "output") as run:
        wait_for_step(run_dir, 2, run)
        servers = [one for one in psutil.Process(run.pid).children(recursive=True) if is_fake_server(one)]
        victim = next(one for one in servers if one.cmdline()[1].endswith("fake_server.py"))  # not what watches it
        victim.kill()
        assert run.wait() == 0, run.text
    status = json.loads((run_dir / "servers/status.json").read_text())
    assert [one["is_serving"] for one in status["servers"]] == [True, True]
    logs = [(run_dir / f"servers/server_{index}.log").read_text() for index in range(2)]
    assert sorted(log.count("started with") for log in logs) == [1, 2] and "misused" not in "".join(logs), logs
    assert "is started again" in run.text
