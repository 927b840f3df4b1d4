"""A real vLLM that computes in bf16, beside trainers in fp32 and bf16: each fault is found beside rounding."""

from collections.abc import Iterator

import pytest

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.server_api import HttpClient
from mcore_rl.rl.engines.weight_push import PushReport
from tests.servers.conftest import Figures
from tests.servers.vllm_server import FAULTS, MODELS, OmittingApi, Trainer, VllmServer

OLD, SEEDS = 70, (71, 72)


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
    trainer.randomize(OLD)
    old = trainer.tensors()
    for seed in SEEDS:
        trainer.randomize(seed)
        report = trainer.push(server.api, dtype="bf16")
        found[f"nothing wrong, {seed}"] = numbers(report, server)
        assert report.living == (server.url,), report.failed
    broken = OmittingApi(HttpClient(server.url), vocab_size=2048, request_timeout_s=600, update_timeout_s=600)
    # An update that lacks tensors can leave memory that nobody has written, of which the probe sees anything.
    broken.old = old
    for fault, parts in FAULTS.items():
        if fault.startswith("a tied") and not MODELS[family].tied_embeddings:
            continue
        broken.omitted = parts
        report = trainer.push(broken, dtype="bf16")
        found[fault] = numbers(report, server)
        assert report.living == (), fault
        assert "does not have the trainer's weights" in report.failed[server.url]
        assert (found[fault]["standard errors"] > 7) == (fault == "an expert missing"), found
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
