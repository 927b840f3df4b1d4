"""Real servers with several workers: parts of each layer, or data-parallel engines behind one address.

Requests land on either engine, so each is asked by itself. vLLM's calls reach all engines, and answer with the first's.
Experts that are divided among engines (--enable-expert-parallel) end a server on a CPU: its kernel takes an expert's
number for its place (vLLM 0.32, fused_moe/experts/cpu_moe.py:303).
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import sleep

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.build import local_shards
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.server_api import HttpClient, Owner, ServedCompletion, ServerError
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.engines.weight_push import WeightPush
from mcore_rl.storage.checksums import crc32_of
from tests.servers.conftest import Figures
from tests.servers.vllm_server import MODELS, Trainer, VllmServer, generated, random_prompts

MODEL, VOCAB = MODELS["qwen3_moe"], 2048
ENGINES = ("--data-parallel-size", "2")
WORKERS = {"one worker": (), "parts of each layer": ("--tensor-parallel-size", "2"), "two engines": ENGINES}
IN_FLIGHT = 48


@pytest.fixture(scope="module")
def server(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(python, MODEL, tmp_path_factory.mktemp("server") / "a", arguments=ENGINES)
    try:
        yield server.wait()
    finally:
        server.close()


def engine_api(server: VllmServer, engine: int) -> VllmApi:
    """An API whose requests land on one of the server's engines."""
    http, owner = HttpClient(server.url), Owner("0123abcd", "tests")
    http._headers["X-data-parallel-rank"] = str(engine)
    return VllmApi(http, vocab_size=VOCAB, request_timeout_s=600, update_timeout_s=600, owner=owner)


def sampled_by_engine(server: VllmServer) -> list[float]:
    """Tokens that each engine has sampled since it began."""
    text = server.api._step("queue")
    found = re.findall(r'^vllm:generation_tokens_total\{engine="(\d)".*\} (\S+)$', text, re.MULTILINE)
    return [float(count) for _, count in sorted(found)]


def assert_right(trainer: Trainer, server: VllmServer, salt: str) -> dict[str, float]:
    """Both engines have the trainer's weights, and say so. Returns the larger numbers."""
    prompts, worst = random_prompts(4, 12, VOCAB), dict[str, float]()
    for engine in range(2):
        before = sampled_by_engine(server)
        api = engine_api(server, engine)
        made = generated([api], prompts, max_new=16, temperature=1.0, salt=salt)
        apart = [after - one for after, one in zip(sampled_by_engine(server), before, strict=True)]
        assert apart[engine] == 64 and apart[1 - engine] == 0
        assert {span.version for one in made for span in one.versions} == {trainer.version}
        found = trainer.compared(zip(prompts, made, strict=True), 1.0)
        assert found.largest <= 1e-5 and found.compared_fraction > 0.3, (engine, found)
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in asdict(found).items()}
    return worst


def test_each_engine_has_the_weights_of_a_push(server: VllmServer, mesh: Mesh, figures: Figures) -> None:
    assert server.api.world_size() == 2
    trainer = Trainer(MODEL, mesh)
    for seed in (1, 2):
        trainer.randomize(seed)
        report = trainer.push(server.api)
        assert report.living == (server.url,) and report.probe < 1e-5, report.failed
    figures["two engines: probe, and completions of each"] = {"probe": report.probe} | assert_right(
        trainer, server, "a"
    )


def test_requests_of_both_engines_go_on_during_an_update(server: VllmServer, mesh: Mesh, figures: Figures) -> None:
    trainer = Trainer(MODEL, mesh)
    trainer.version = 20
    trainer.randomize(seed=21)
    assert trainer.push(server.api).living
    prompts = random_prompts(4, 3, VOCAB, seed=1)
    engines = [engine_api(server, engine) for engine in range(2)]
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(generated, engines, prompts, max_new=480, temperature=0.7, salt="in flight")
        sleep(1.5)
        trainer.randomize(seed=22)
        assert trainer.push(server.api).living
        made = running.result()
    assert all([span.version for span in one.versions] == [21, 22] for one in made), made[0].versions
    cuts, pairs = [one.versions[1].start for one in made], list(zip(prompts, made, strict=True))
    of_new = [trainer.compared([pair], 0.7, start=cut) for pair, cut in zip(pairs, cuts, strict=True)]
    trainer.randomize(seed=21)
    of_old = trainer.compared(pairs, 0.7, ends=cuts)
    worst = max(one.largest for one in of_new)
    figures["two engines: update in flight"] = {"old span": of_old.largest, "new span": worst, "cuts": cuts}
    assert of_old.largest <= 1e-5 and worst <= 2e-5
    assert of_old.compared_fraction > 0.3 and max(one.compared_fraction for one in of_new) > 0.3


def test_a_part_of_a_module_is_undone_on_both_engines(
    server: VllmServer, mesh: Mesh, tmp_path: Path, figures: Figures
) -> None:
    trainer = Trainer(MODEL, mesh)
    trainer.version = 30
    trainer.randomize(seed=31)
    name = "model.layers.0.self_attn.q_proj.weight"
    path = tmp_path / "model.safetensors"
    save_file({name: trainer.tensors()[name]}, path)
    server.api.pause()
    server.api.start_update()
    server.api.load({"files": [{"path": str(path), "crc32": crc32_of(path)}]})
    with pytest.raises(ServerError, match="status 500"):
        server.api.load({"files": [{"path": str(path), "crc32": "00000000"}]})
    server.api.undo_update()
    report = trainer.push(server.api)
    assert report.living == (server.url,) and report.probe < 1e-5, report.failed
    figures["two engines: after a part of a module"] = assert_right(trainer, server, "undone")


def test_an_engine_that_dies_while_a_call_of_an_update_is_open_fails_that_call(python: str, tmp_path: Path) -> None:
    """Its server never answers the call, and keeps the connection."""
    server = VllmServer(python, MODEL, tmp_path / "dying")
    try:
        server.wait()
        (engine,) = [process for process in server.workers() if "Engine" in process.name()]
        engine.suspend()
        with ThreadPoolExecutor(1) as beside:
            call = beside.submit(server.api.pause)
            sleep(1)
            engine.kill()
            with pytest.raises(ServerError, match="no longer listens"):
                call.result(60)
    finally:
        server.close()


def moved(trainer: Trainer) -> None:
    """Turn the sign of one column of each weight, so that logprobs change and rounding does not grow."""
    with torch.no_grad():
        for shard in local_shards(trainer.chunks):
            shard.data[..., 0] *= -1


@pytest.mark.parametrize("workers", WORKERS)
def test_differences_bring_the_weights_and_what_workers_do_not_have_goes_whole_in_the_same_push(
    workers: str, python: str, mesh: Mesh, tmp_path: Path, figures: Figures
) -> None:
    """Each worker keeps the bytes of the last push: until another run pushes, or the server is started anew."""
    server = VllmServer(python, MODEL, tmp_path / "a", arguments=WORKERS[workers])
    try:
        server.wait()
        trainer, other = Trainer(MODEL, mesh), Trainer(MODEL, mesh)
        trainer.randomize(seed=1)
        other.randomize(seed=2)
        whole = sum(tensor.nbytes for tensor in trainer.tensors().values())
        push, sent = trainer.pushing(server.api, delta=True), list[int]()

        def pushed(push: WeightPush) -> int:
            trainer.version += 1
            report = push.push(trainer.version)
            assert report.living == (server.url,) and report.probe < 1e-5, (sent, report.failed)
            return report.num_bytes

        for _ in range(3):
            moved(trainer)
            sent.append(pushed(push))
        assert sent[0] == whole and max(sent[1:]) < whole / 10, (whole, sent)
        assert pushed(other.pushing(server.api, delta=True)) == whole
        moved(trainer)
        sent.append(pushed(push))
        server.close()
        server = VllmServer(
            python, MODEL, tmp_path / "b", arguments=WORKERS[workers], port=int(server.url.split(":")[-1])
        ).wait()
        moved(trainer)
        sent.append(pushed(push))
        assert min(sent[3:]) > whole, (whole, sent)
        moved(trainer)
        sent.append(pushed(push))
        assert sent[5] < whole / 10
        figures[f"{workers}: bytes of pushes with differences"] = {"all": whole, "sent": sent}
    finally:
        server.close()


@pytest.fixture
def recording(python: str, tmp_path: Path) -> Iterator[VllmServer]:
    """A server of two engines that record routes."""
    arguments = (*ENGINES, "--enable-return-routed-experts")
    server = VllmServer(python, MODEL, tmp_path / "recording", arguments=arguments, interpreted=True)
    try:
        yield server.wait()
    finally:
        server.close()


def test_routes_of_both_engines_are_the_trainers_also_of_completions_that_an_update_meets(
    recording: VllmServer, mesh: Mesh, figures: Figures
) -> None:
    """A token's routes are those of the weights that sampled the one after it, though all are computed again."""
    trainer, sampling = Trainer(MODEL, mesh), Sampling(max_new_tokens=IN_FLIGHT, with_routes=True)
    trainer.randomize(seed=1)
    assert trainer.push(recording.api).living
    prompts = random_prompts(4, 12, VOCAB, seed=6)

    def complete(index: int) -> ServedCompletion:
        api = engine_api(recording, index % 2)
        return api.generate(prompts[index], sampling, index, salt="routes", request_id=f"routes-{index}")

    before = sampled_by_engine(recording)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(complete, index) for index in range(4)]
        while any(now < then + 24 for now, then in zip(sampled_by_engine(recording), before, strict=True)):
            assert not all(one.done() for one in running)
            sleep(0.2)
        trainer.randomize(seed=2)
        report = trainer.push(recording.api)
        made = [one.result() for one in running]
    assert report.living == (recording.url,) and report.probe < 1e-5, report.failed
    cuts = [one.versions[1].start for one in made]
    assert all([span.version for span in one.versions] == [1, 2] for one in made), made[0].versions
    num_compared = [0, 0]
    for is_new, seed in enumerate((1, 2)):
        trainer.randomize(seed)
        for prompt, one, cut in zip(prompts, made, cuts, strict=True):
            wanted_TLK, num_sure = trainer.routes([*prompt, *one.tokens_T])
            assert one.experts_TLK is not None
            found_TLK = torch.from_numpy(one.experts_TLK.astype("int64")).sort(-1).values
            assert len(found_TLK) == len(wanted_TLK) - 1
            middle = len(prompt) - 1 + cut
            rows = slice(middle, num_sure) if is_new else slice(0, min(middle, num_sure))
            assert torch.equal(found_TLK[rows], wanted_TLK[:-1][rows]), (is_new, rows)
            num_compared[is_new] += len(found_TLK[rows])
    figures["routes of two engines: tokens compared before an update, and after"] = num_compared
    assert min(num_compared) > 20
