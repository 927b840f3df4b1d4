"""A real vLLM has the trainer's weights of every family that `checks/engine.py` lets through, tensor by tensor."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import pytest

from mcore_rl.checks.engine import PROBED_FAMILIES
from mcore_rl.config.model import ModelConfig
from mcore_rl.rl.engines.server_api import HttpClient
from tests.servers.vllm_server import MAX_TOKENS, OmittingApi, Trainer, VllmServer, generated, random_prompts
from tests.tiny_models import TINY

VOCAB = 2048
OLD, NEW = 51, 52
LAYER = "model.layers.2."


@pytest.fixture(scope="module", params=PROBED_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> ModelConfig:
    """The family's tiny model, at widths that vLLM's kernels for CPUs take."""
    tiny = TINY[family]
    widths = {"hidden_size": 128, "head_dim": 32, "ffn_hidden_size": 128, "vocab_size": VOCAB}
    experts = tiny.moe.model_copy(update={"ffn_hidden_size": 64}) if tiny.is_moe else tiny.moe
    return tiny.model_copy(update={**widths, "max_position": MAX_TOKENS, "moe": experts})


@pytest.fixture(scope="module")
def server(model: ModelConfig, python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(python, model, tmp_path_factory.mktemp("server") / "model")
    try:
        yield server.wait()
    finally:
        server.close()


def test_a_server_has_the_weights_and_each_kind_of_tensor_that_stays_old_is_found(family, model, server, mesh, figures):
    trainer = Trainer(model, mesh)
    trainer.randomize(OLD)
    old = trainer.tensors()
    trainer.randomize(NEW)
    report = trainer.push(server.api)
    probe = report.probe
    assert report.living == (server.url,) and probe < 1e-5, report.failed
    prompts = random_prompts(16, 12, VOCAB)
    made = generated([server.api], prompts, max_new=32, temperature=1.0, salt="new")
    found = trainer.compared(zip(prompts, made, strict=True), 1.0)
    assert found.largest <= 1e-5 and found.compared_fraction > 0.8, found

    broken = OmittingApi(HttpClient(server.url), vocab_size=VOCAB, request_timeout_s=600, update_timeout_s=600)
    broken.old = old
    least = float("inf")
    kinds = kinds_of(old, is_tied=model.tied_embeddings)
    for names in kinds.values():
        broken.omitted = names
        report = trainer.push(broken)
        assert report.living == (), names
        assert "does not have the trainer's weights" in report.failed[server.url], report.failed
        least = min(least, report.differences[server.url].largest)
    figures[f"{family}: whole, and each kind of tensor"] = {
        "probe": probe,
        **asdict(found),
        "kinds": len(kinds),
        "least difference of a kind that stays old": least,
    }


def kinds_of(names: Iterable[str], *, is_tied: bool) -> dict[str, tuple[str, ...]]:
    """Names of the tensors outside of layers and in one layer, by their kind: of all experts, or of a weight that is
    sent under two names, as one.
    """
    kinds: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name.startswith(LAYER) or ".layers." not in name:
            is_head = is_tied and name == "lm_head.weight"
            kind = "model.embed_tokens.weight" if is_head else re.sub(r"experts\.\d+", "experts", name)
            kinds[kind] = (*kinds.get(kind, ()), name)
    return kinds
