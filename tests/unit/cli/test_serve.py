"""`mcore-rl serve`: servers of a config on this machine, started anew when they end or when a training asks for it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mcore_rl.cli.cli import main
from mcore_rl.rl.engines.server_api import HttpClient, ServerError
from mcore_rl.rl.engines.server_process import replacement_request
from mcore_rl.workers.launcher import free_port

FAKE = str(Path(__file__).parents[2] / "fake_server.py")


def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(
        f"run_dir = '{tmp_path}/run'\n[platform]\ndevice = 'cpu'\n[rl.prompts]\ntask = 'arithmetic'\n"
        f"[rl.engine]\nkind = 'vllm'\ncommand = {json.dumps([sys.executable, FAKE])}\n"
    )
    return path


def test_servers_that_end_or_lack_the_weights_are_started_anew_and_all_end_with_it(tmp_path: Path) -> None:
    port = free_port()
    http = HttpClient(f"http://127.0.0.1:{port}")

    def answers() -> bool:
        try:
            return http.get("/health", timeout_s=2) is None
        except ServerError:
            return False

    words = ["-m", "mcore_rl.cli.cli", "serve", str(config_file(tmp_path)), "--port", str(port)]
    log = (tmp_path / "stderr").open("w+")
    process = subprocess.Popen([sys.executable, *words], stderr=log)
    try:
        wait_for(answers)
        fake = next(
            p for p in psutil.Process(process.pid).children(recursive=True) if p.cmdline()[1:2] == [FAKE]
        )
        fake.kill()
        wait_for(lambda: "started anew, as it has ended" in Path(log.name).read_text())
        wait_for(answers)
        request = replacement_request(tmp_path / "run/servers", f"http://{socket.gethostname()}:{port}")
        request.parent.mkdir(parents=True, exist_ok=True)
        request.write_text("its probe failed\n")
        wait_for(lambda: "as the training asks for it (its probe failed)" in Path(log.name).read_text())
        wait_for(answers)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(300) == 0
        assert not psutil.wait_procs(children, timeout=120)[1]
        assert (
            "started with --served-model-name policy" in next(tmp_path.glob("run/servers/*.log")).read_text()
        )
    finally:
        process.kill()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_native_engine_has_no_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(config_file(tmp_path)), "rl.engine.kind=native", "rl.engine.command=none"]) == 2
    assert 'rl.engine.kind="native" has no servers. Set rl.engine.kind="vllm"' in capsys.readouterr().err
