"""Whole runs on real servers: two runs on one server, a trainer that is killed inside an update, and a server that
sleeps while the policy trains.
"""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.engines.server_api import ServerError
from tests.e2e.conftest import write_rl_config
from tests.e2e.test_resume import running, wait_for_step
from tests.e2e.test_rl import SERVED, computed
from tests.forked import run_main, succeed
from tests.servers.conftest import Figures
from tests.servers.vllm_server import FORKED, VllmServer

WORDS = (
    *("mesh.tp=1", "mesh.ep=1", "model.head_dim=32", "train.steps=6", "train.global_batch=8"),
    *("train.eval_interval=none", "checkpoint.interval=2", "checkpoint.asynchronous=false", "rl.samples.interval=none"),
    *("rl.rollout.prompts_per_step=4", "rl.rollout.group_size=4", "replay.kind=none", "rl.loss.kl_coeff=0"),
    *("rl.loss.reference_refresh_rollouts=none", "rl.engine.kind=vllm"),
)
"""Three rollout batches of two updates each, with heads of a width that vLLM has on CPUs."""
KILLED = "SIGKILL.push.13"
"""Five buckets are a push: the trainer ends inside the third one, after two buckets and the checkpoint of step 2."""


@pytest.fixture(scope="module")
def rl_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rl_config(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(rl_file: Path, python: str) -> Iterator[VllmServer]:
    server = VllmServer(python, load_config(RlRunConfig, rl_file, WORDS).model, rl_file.parent / "model")
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.fixture(scope="module")
def words(rl_file: Path, server: VllmServer) -> list[str]:
    return [str(rl_file), *WORDS, f"rl.engine.urls=['{server.url}']"]


@pytest.fixture(scope="module")
def in_one_go(words: list[str], rl_file: Path) -> Path:
    """The folder of the run on a server that nothing happens to."""
    succeed("mcore_rl.programs.rl", words)
    return rl_file.parent / "rl"


def assert_same(run_dir: Path, in_one_go: Path) -> float:
    """The run computed what the other one did. Returns its largest |engine's - trainer's logprob| in nats."""
    wanted, found = computed(in_one_go, SERVED), computed(run_dir, SERVED)
    assert len(wanted) == 6 and found.keys() == wanted.keys()
    for step, numbers in wanted.items():
        assert found[step] == pytest.approx(numbers, rel=1e-4, abs=1e-6)
    mismatches = [one["rollout/mismatch_max"] for one in computed(run_dir, ("rollout/mismatch_max",)).values()]
    assert len(mismatches) == 6 and max(mismatches) < 1e-4
    return max(mismatches)


def test_a_second_run_on_a_server_is_refused_by_the_name_of_the_first_which_goes_on(
    words: list[str], in_one_go: Path, tmp_path: Path
) -> None:
    first_dir, second = tmp_path / "first", [*words, f"run_dir={tmp_path / 'second'}"]
    with running(["rl", *words, f"run_dir={first_dir}", "train.steps=2000"], tmp_path / "output") as first:
        wait_for_step(first_dir, 2, first)
        refused = run_main("mcore_rl.programs.rl", second)
        assert refused.returncode == 2 and f"belongs to the run {first_dir}:" in refused.stderr, refused.stderr
        done = max(computed(first_dir, SERVED))
        wait_for_step(first_dir, done + 4, first)
        first.send_signal(signal.SIGUSR1)
        assert first.wait() == 0, first.text
    # A run that ends releases its server.
    succeed("mcore_rl.programs.rl", second)
    assert_same(tmp_path / "second", in_one_go)


def test_a_run_that_is_killed_inside_an_update_takes_its_server_over_and_goes_on_with_what_it_would_have_computed(
    words: list[str], in_one_go: Path, server: VllmServer, tmp_path: Path, figures: Figures
) -> None:
    words = [*words, f"run_dir={tmp_path / 'run'}"]
    killed = run_main("tests.e2e.signalled", ["rl", KILLED, *words])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(ServerError, match="already active"):  # half of the weights are there, and computing is paused
        server.api.start_update()
    resumed = succeed("mcore_rl.programs.rl", words)
    assert f"resumed from {tmp_path}/run/checkpoints/iter_0000002, step 2" in resumed.stdout, resumed.stdout
    figures["trainer killed inside an update, resumed: largest |engine - trainer|"] = assert_same(
        tmp_path / "run", in_one_go
    )


CYCLE = ["/wake_up?tags=weights", "/start_weight_update", "/finish_weight_update", "/wake_up?tags=kv_cache", "/sleep"]


def shared_words(rl_file: Path, python: str, run_dir: Path) -> list[str]:
    """Words of a run whose server, on its rank's machine, sleeps while the policy trains."""
    command = json.dumps([python, str(FORKED)])
    words = [str(rl_file), *WORDS, f"run_dir={run_dir}", f"rl.engine.command={command}", "rl.engine.dtype=fp32"]
    return [*words, "rl.engine.share_gpus=true", "rl.update.store=host"]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Processes of the server that a run has started."""
    own = f"{run_dir}/servers"
    started = [one for one in psutil.process_iter(["cmdline"]) if own in " ".join(one.info["cmdline"] or ())]
    return [child for one in started for child in (one, *one.children(recursive=True))]


@pytest.mark.parametrize("way", ["files", "ipc"])
def test_a_server_that_sleeps_while_the_policy_trains_samples_what_one_does_that_never_sleeps(
    way: str, rl_file: Path, in_one_go: Path, python: str, tmp_path: Path, figures: Figures
) -> None:
    """The server goes through all states of a step, but frees nothing on a CPU."""
    words = shared_words(rl_file, python, tmp_path / "run")
    succeed("mcore_rl.programs.rl", [*words, f"rl.engine.transport={way}"])
    log = (tmp_path / "run/servers/server_0.log").read_text()
    calls = re.findall(r'"POST (\S+) HTTP/1.1" 200', log)
    phases = [next((one for one in CYCLE if call.startswith(one)), "") for call in calls]
    # The first sleep is before the trainer's models; three rollout batches and the evaluation at the end follow.
    assert [phase for phase in phases if phase] == ["/sleep", *CYCLE * 4], calls
    figures[f"a server that sleeps while the policy trains, weights by {way}: largest |engine - trainer|"] = (
        assert_same(tmp_path / "run", in_one_go)
    )
    assert not processes_of(tmp_path / "run")
