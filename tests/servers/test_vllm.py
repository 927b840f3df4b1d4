"""A real vLLM on CPUs has the trainer's weights after each update, and the probe shows when it has not."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import sleep

import pytest

from mcore_rl.config.rl import EngineConfig
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.base import Capabilities
from mcore_rl.rl.engines.http_client import HttpClient
from mcore_rl.rl.engines.make import refuse_version
from mcore_rl.rl.engines.served import ServedEngine
from mcore_rl.rl.engines.server_fleet import ServerFleet
from tests.generating import spelled
from tests.servers.conftest import Figures
from tests.servers.vllm_server import (
    MAX_TOKENS,
    MODELS,
    OmittingApi,
    Trainer,
    VllmServer,
    generated,
    random_prompts,
)
from tests.unit.rl.engines import contract

VOCAB = 2048
PARTS = {
    "embedding": "embedding.",
    "attention": "self_attention.linear",
    "router": "router.",
    "experts": "experts.experts.",
    "norms": "norm",
    "head": "output_layer.",
}
FAULTS = {
    "one tensor left old": ("layers.2.mlp.gate.weight",),
    "half an update": ("layers.2.", "layers.3."),
    "an expert missing": ("layers.1.mlp.experts.5.",),
    "q without k and v": ("k_proj", "v_proj"),
    "a tied head left old": ("lm_head.weight",),
}


def restored(trainer: Trainer, server: VllmServer) -> None:
    """Give the server sound weights again: after a broken update one more may be needed that is whole."""
    assert any(trainer.push(server.api).living for _ in range(3))


def test_a_server_that_started_with_weights_of_its_own_has_the_trainers_after_a_push(
    family: str, server: VllmServer, trainer: Trainer, figures: Figures
) -> None:
    trainer.randomize(seed=2)
    report = trainer.push(server.api)
    assert report.living == (server.url,) and report.probe < 1e-5
    figures[f"{family}: push"] = {
        "probe": report.probe,
        "bytes": report.num_bytes,
        "largest_bucket_bytes": report.largest_bucket_bytes,
        "seconds": {phase: round(seconds, 3) for phase, seconds in report.seconds.items()},
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_64_concurrent_requests_are_the_trainers(
    temperature: float, family: str, server: VllmServer, trainer: Trainer, figures: Figures
) -> None:
    prompts = random_prompts(64, 12, VOCAB)
    made = generated([server.api], prompts, max_new=32, temperature=temperature, salt=f"v{trainer.version}")
    assert {one.versions[0].version for one in made} == {trainer.version}
    found = trainer.compared(zip(prompts, made, strict=True), temperature)
    figures[f"{family}: 64 requests at temperature {temperature}"] = asdict(found)
    assert found.largest <= 1e-5 and found.compared_fraction > 0.8


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_weights_arrives_alone(
    part: str, family: str, server: VllmServer, trainer: Trainer, figures: Figures
) -> None:
    if part == "head" and MODELS[family].tied_embeddings:
        return  # the embedding is the head
    trainer.randomize(seed=11, part=PARTS[part])
    report = trainer.push(server.api)
    figures[f"{family}: {part} alone"] = report.probe
    assert report.living and report.probe < 1e-5


def test_a_completion_that_runs_during_an_update_has_two_spans_each_of_its_own_weights(
    family: str, server: VllmServer, trainer: Trainer, figures: Figures
) -> None:
    trainer.randomize(seed=21)
    assert trainer.push(server.api).living
    old = trainer.version
    prompts = random_prompts(4, 3, VOCAB, seed=1)
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(
            generated, [server.api], prompts, max_new=480, temperature=0.7, salt="in flight"
        )
        sleep(1.5)
        trainer.randomize(seed=22)
        assert trainer.push(server.api).living
        made = running.result()
    new = trainer.version
    assert all([span.version for span in one.versions] == [old, new] for one in made), made[0].versions
    cuts = [one.versions[1].start for one in made]
    assert all(0 < cut < 480 for cut in cuts)
    pairs = list(zip(prompts, made, strict=True))
    of_new = [trainer.compared([pair], 0.7, start=cut) for pair, cut in zip(pairs, cuts, strict=True)]
    trainer.randomize(seed=21)
    of_old = trainer.compared(pairs, 0.7, ends=cuts)
    worst = max(one.largest for one in of_new)
    figures[f"{family}: update in flight"] = {
        "old span": of_old.largest,
        "new span": worst,
        "cuts": cuts,
        "compared_fraction": [of_old.compared_fraction, *(one.compared_fraction for one in of_new)],
    }
    assert of_old.largest <= 1e-5 and worst <= 2e-5
    assert of_old.compared_fraction > 0.3 and max(one.compared_fraction for one in of_new) > 0.3
    restored(trainer, server)


def test_a_prompt_is_not_answered_from_keys_and_values_of_old_weights(
    family: str, server: VllmServer, trainer: Trainer, figures: Figures
) -> None:
    prompt = random_prompts(1, 200, VOCAB, seed=2)
    trainer.randomize(seed=31)
    assert trainer.push(server.api).living
    # The same salt on purpose: what must clear the cache is the push.
    generated([server.api], prompt, max_new=4, temperature=1.0, salt="same")
    trainer.randomize(seed=32)
    assert trainer.push(server.api).living
    made = generated([server.api], prompt, max_new=4, temperature=1.0, salt="same")[0]
    found = trainer.compared([(prompt[0], made)], 1.0)
    # A tie among the 200 tokens of the prompt would leave nothing to compare.
    figures[f"{family}: same prompt after an update"] = asdict(found)
    assert found.largest <= 1e-5 and found.after_ties < 0.1


@pytest.mark.parametrize("fault", FAULTS)
def test_the_probe_finds_weights_that_did_not_arrive(
    fault: str, family: str, server: VllmServer, trainer: Trainer, figures: Figures
) -> None:
    if fault.startswith("a tied") and not MODELS[family].tied_embeddings:
        return
    trainer.randomize(seed=41)
    restored(trainer, server)
    broken = OmittingApi(
        HttpClient(server.url), vocab_size=VOCAB, request_timeout_s=600, update_timeout_s=600
    )
    broken.omitted = FAULTS[fault]
    trainer.randomize(seed=42)
    report = trainer.push(broken)
    difference = report.differences[server.url]
    figures[f"{family}: probe, {fault}"] = {"largest": difference.largest, "mean": difference.mean}
    assert report.living == ()
    assert "does not have the trainer's weights" in report.failed[server.url]
    restored(trainer, server)


def test_the_served_engine_keeps_the_contract_of_engines(
    server: VllmServer, trainer: Trainer, mesh: Mesh, tmp_path: Path
) -> None:
    config = EngineConfig(kind="vllm", urls=(server.url,))
    engine = ServedEngine(
        lambda url: server.api,
        ServerFleet(config, lambda url: server.api, tmp_path, None, partial(refuse_version, "vllm")),
        trainer.chunks,
        mesh,
        trainer.model,
        spelled,
        config,
        capabilities=Capabilities(max_tokens=MAX_TOKENS, routes=False, seeded=False),
        refusal=lambda sampling: None,
    )
    try:
        trainer.version += 1
        engine.update_weights(trainer.version)
        contract.check_all(engine, VOCAB)
    finally:
        engine.close()
