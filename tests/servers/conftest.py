"""One real vLLM server a family, and the figures of what was seen (make test-servers).

MCORE_RL_VLLM names the Python that has vLLM; MCORE_RL_FIGURES the file into which figures go, none without it.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from tests.servers.vllm_server import MODELS, UNTRIED, Trainer, VllmServer

Figures = dict[str, Any]
VERSIONS = """
from importlib.metadata import packages_distributions, version
print(*(version(packages_distributions()[name][0]) for name in ("vllm", "torch")))
"""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A version that is newer than the table of the protocol, or older, is named in one line at the end."""
    if UNTRIED:
        terminalreporter.write_line(f"Not a tried version: {UNTRIED[0]}", yellow=True)


@pytest.fixture(scope="session")
def python() -> str:
    return os.environ["MCORE_RL_VLLM"]


@pytest.fixture(scope="session")
def figures(python: str) -> Iterator[Figures]:
    found: Figures = {}
    yield found
    if path := os.environ.get("MCORE_RL_FIGURES"):
        printed = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
        vllm, torch = printed.split()
        head = {
            "date": time.strftime("%Y-%m-%d"),
            "command": "make test-servers",
            "vllm": vllm,
            "torch": torch,
            "device": "CPU",
            "differences": "largest |logprob of the server - of the training modules| in nats; fp32 unless named",
        }
        record = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        # A call of a part of the tests leaves the figures of the others as they were.
        tests = record.get("tests", {}) | head | found
        Path(path).write_text(json.dumps(record | {"tests": tests}, indent=1) + "\n")


@pytest.fixture(scope="session")
def mesh() -> Iterator[Mesh]:
    start(PlatformConfig())
    mesh = build_mesh(MeshConfig())
    seed_ranks(1)
    yield mesh
    destroy_mesh()


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(family: str, python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(python, MODELS[family], tmp_path_factory.mktemp("server") / "model")
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.fixture(scope="module")
def trainer(family: str, server: VllmServer, mesh: Mesh) -> Trainer:
    """A trainer whose weights the server has."""
    trainer = Trainer(MODELS[family], mesh)
    trainer.randomize(seed=1)
    assert trainer.push(server.api).living
    return trainer
