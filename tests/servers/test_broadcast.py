"""Weights by broadcast reach a real server: by gloo here, by the same code with NCCL between GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.vllm_server import MODELS, Trainer, VllmServer

MODEL = MODELS["qwen3_moe"]


@pytest.fixture
def server(python: str, tmp_path: Path) -> Iterator[VllmServer]:
    server = VllmServer(python, MODEL, tmp_path / "model", backend="mcore_broadcast")
    try:
        yield server.wait()
    finally:
        server.close()


def test_a_broadcast_brings_all_weights_in_a_group_of_each_push(server, mesh, figures):
    trainer = Trainer(MODEL, mesh)
    for seed in (1, 2):
        trainer.randomize(seed)
        report = trainer.push(server.api, transport="nccl")
        assert report.living == (server.url,), report.failed
        assert report.probe < 1e-5
    figures["broadcast by gloo"] = {
        "probe": report.probe,
        "seconds": {phase: round(seconds, 3) for phase, seconds in report.seconds.items()},
    }
