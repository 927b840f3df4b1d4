"""A real vLLM that computes in bf16, beside trainers in fp32 and bf16: each fault is found beside rounding."""

from collections.abc import Iterator

import pytest

from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.http_client import HttpClient
from mcore_rl.rl.engines.weight_push import PushReport
from tests.servers.conftest import Figures
from tests.servers.vllm_server import FAULTS, MODELS, OmittingApi, Trainer, VllmServer

SEEDS = (71, 72, 73)


@pytest.fixture(scope="module")
def server(family: str, python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server") / "model"
    server = VllmServer(python, MODELS[family], folder, dtype="bfloat16")
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_server_in_bf16_has_the_weights_and_each_fault_is_found(
    precision: str, family: str, server: VllmServer, mesh: Mesh, figures: Figures
) -> None:
    trainer = Trainer(MODELS[family], mesh, "bf16" if precision == "bf16" else "fp32")
    found: dict[str, dict[str, float]] = {}
    for seed in SEEDS:
        trainer.randomize(seed)
        report = trainer.push(server.api, dtype="bf16")
        assert report.living == (server.url,), report.failed
        found[f"nothing wrong, {seed}"] = numbers(report, server)
    for fault, parts in FAULTS.items():
        if fault.startswith("a tied") and not MODELS[family].tied_embeddings:
            continue
        trainer.randomize(SEEDS[0])
        # After a broken update one more may be needed that is whole.
        assert any(trainer.push(server.api, dtype="bf16").living for _ in range(3))
        broken = OmittingApi(
            HttpClient(server.url), vocab_size=2048, request_timeout_s=600, update_timeout_s=600
        )
        broken.omitted = parts
        trainer.randomize(SEEDS[1])
        report = trainer.push(broken, dtype="bf16")
        found[fault] = numbers(report, server)
        assert report.living == (), fault
        assert "does not have the trainer's weights" in report.failed[server.url]
        is_expert = found[fault]["standard errors"] > 7
        assert is_expert == (fault == "an expert missing"), found
    figures[f"{family}: probe in bf16, trainer in {precision}"] = found


def numbers(report: PushReport, server: VllmServer) -> dict[str, float]:
    """What the probe has seen of a server."""
    difference = report.differences[server.url]
    assert difference.expert is not None
    return {
        "mean": difference.mean,
        "limit": report.limit.limit,
        "expert ratio": difference.expert.ratio,
        "standard errors": difference.expert.errors,
        "probe seconds": round(report.seconds["probe"], 2),
    }
