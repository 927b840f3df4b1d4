"""Weights reach a real server without files: by gloo and by named shared memory here, by the same code with NCCL and
CUDA IPC between GPUs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.rl.engines.server_api import ServerError
from tests.servers.vllm_server import MODELS, Trainer, VllmServer

MODEL = MODELS["qwen3_moe"]
WAYS: dict[str, dict[str, Any]] = {
    "mcore_broadcast": {"transport": "nccl"},
    "mcore_slots": {"transport": "ipc", "share_gpus": True},
}
"""Fields of `rl.engine` by the backend of the server."""


@pytest.fixture(params=WAYS)
def server(request: pytest.FixtureRequest, python: str, tmp_path: Path) -> Iterator[VllmServer]:
    server = VllmServer(python, MODEL, tmp_path / "model", backend=request.param)
    try:
        yield server.wait()
    finally:
        server.close()


def test_a_push_without_files_brings_all_weights_also_after_one_that_broke_off(server, request, mesh, figures):
    trainer, backend = Trainer(MODEL, mesh), request.node.callspec.params["server"]
    for seed in (1, 2):
        trainer.randomize(seed)
        report = trainer.push(server.api, **WAYS[backend])
        assert report.living == (server.url,), report.failed
        assert report.probe < 1e-5
        server.api.pause()
        server.api.start_update()
        with pytest.raises(ServerError, match="status 500"):
            server.api.load({"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "source": {"elsewhere": []}})
        server.api.undo_update()
    figures[f"pushes by {backend}"] = {
        "probe": report.probe,
        "seconds": {phase: round(seconds, 3) for phase, seconds in report.seconds.items()},
    }
