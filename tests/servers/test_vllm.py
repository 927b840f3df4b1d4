"""A real vLLM on CPUs has the trainer's weights after each update, and the probe shows when it has not."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest

from mcore_rl.rl.engines.http_client import HttpClient
from tests.servers.conftest import Figures
from tests.servers.vllm_server import MODELS, OmittingApi, Trainer, VllmServer, generated, random_prompts

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
    worst = max(
        trainer.largest_difference(prompt, one, temperature)
        for prompt, one in zip(prompts, made, strict=True)
    )
    figures[f"{family}: 64 requests at temperature {temperature}"] = worst
    assert worst <= 1e-5


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
    ends = list(zip(prompts, made, cuts, strict=True))
    of_new = max(trainer.largest_difference(prompt, one, 0.7, start=cut) for prompt, one, cut in ends)
    trainer.randomize(seed=21)
    of_old = max(trainer.largest_difference(prompt, one, 0.7, end=cut) for prompt, one, cut in ends)
    figures[f"{family}: update in flight"] = {"old span": of_old, "new span": of_new, "cuts": cuts}
    assert of_old <= 1e-5 and of_new <= 2e-5
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
    worst = trainer.largest_difference(prompt[0], made, 1.0)
    figures[f"{family}: same prompt after an update"] = worst
    assert worst <= 1e-5


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
