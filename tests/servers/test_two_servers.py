"""Two real servers of which one dies: the other goes on, and a new one gets the present weights from a push."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.server_api import ServedCompletion, ServerError
from tests.servers.conftest import Figures
from tests.servers.vllm_server import MODELS, Trainer, VllmServer, generated, random_prompts

MODEL = MODELS["qwen3_moe"]


@pytest.fixture
def started(python: str, tmp_path: Path) -> Iterator[list[VllmServer]]:
    servers: list[VllmServer] = []
    try:
        servers += [VllmServer(python, MODEL, tmp_path / name) for name in "ab"]
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.close()


def seconds_until_error(running: "Future[list[ServedCompletion]]", since_s: float) -> float:
    with pytest.raises(ServerError):
        running.result(timeout=120)
    return round(time.monotonic() - since_s, 2)


def test_a_server_that_dies_is_left_out_and_a_new_one_gets_the_present_weights(
    started: list[VllmServer], python: str, tmp_path: Path, mesh: Mesh, figures: Figures
) -> None:
    trainer = Trainer(MODEL, mesh)
    trainer.randomize(seed=1)
    first, second = started
    both = trainer.push(first.api, second.api)
    assert both.living == (first.url, second.url)
    prompts = random_prompts(4, 8, 2048)
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(generated, [second.api], prompts, max_new=480, temperature=1.0, salt="w")
        time.sleep(2)
        since_s = time.monotonic()
        for worker in second.workers():
            worker.kill()
        figures["worker killed: seconds until its requests fail"] = seconds_until_error(running, since_s)
    assert not second.api.is_healthy()
    trainer.randomize(seed=2)
    report = trainer.push(first.api, second.api)
    assert report.living == (first.url,) and list(report.failed) == [second.url]
    assert report.probe < 1e-5
    figures["worker killed: the push to it"] = report.failed[second.url].replace(second.url, "URL")[:200]
    second.close()
    third = VllmServer(python, MODEL, tmp_path / "c")
    started.append(third.wait())
    report = trainer.push(first.api, third.api)
    assert report.living == (first.url, third.url) and report.probe < 1e-5
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(generated, [third.api], prompts, max_new=480, temperature=1.0, salt="s")
        time.sleep(2)
        since_s = time.monotonic()
        os.killpg(third.process.pid, signal.SIGKILL)
        figures["server killed: seconds until its requests fail"] = seconds_until_error(running, since_s)
    report = trainer.push(first.api, third.api)
    assert report.living == (first.url,) and report.probe < 1e-5
    made = generated([first.api], prompts, max_new=16, temperature=1.0, salt=f"v{trainer.version}")
    found = trainer.compared(zip(prompts, made, strict=True), 1.0)
    figures["the other server's completions after both"] = asdict(found)
    assert found.largest <= 1e-5 and found.compared_fraction > 0.5
