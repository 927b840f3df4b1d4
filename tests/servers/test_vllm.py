"""A real vLLM on CPUs has the trainer's weights after each update, and the probe shows when it has not."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import sleep

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.config.data import DataConfig, TokenizerConfig
from mcore_rl.config.load import dump_config
from mcore_rl.config.rl.loss import DistillConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.chat import Conversation
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.hf_stream import WeightStream
from mcore_rl.rl.engines.server_api import HttpClient, ServerError
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.models.served_teachers import ServedTeachers
from mcore_rl.rl.types import Group, Problem, Prompt
from mcore_rl.storage.checkpoints.write import save_weights
from mcore_rl.storage.checksums import crc32_of
from tests.conversing import END, chat_of, config_of, conversations_of, sampling, seeds_of, write_tokenizer
from tests.forked import CLI, succeed
from tests.generating import prompt_of, spelled
from tests.servers.conftest import Figures
from tests.servers.vllm_server import (
    FAULTS,
    MODELS,
    OmittingApi,
    Trainer,
    VllmServer,
    generated,
    random_prompts,
    served_engine,
)
from tests.unit.rl.engines import contract
from tests.unit.rl.groups import completion_of

VOCAB = 2048
PARTS = {
    "embedding": "embedding.",
    "attention": "self_attention.linear",
    "router": "router.",
    "experts": "experts.experts.",
    "norms": "norm",
    "head": "output_layer.",
}


def restored(trainer: Trainer, server: VllmServer) -> None:
    """Give the server sound weights again: after a broken update one more may be needed that is whole."""
    assert any(trainer.push(server.api).living for _ in range(3))


def test_a_server_that_started_with_weights_of_its_own_has_the_trainers_after_a_push(family, server, trainer, figures):
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
def test_logprobs_of_64_concurrent_requests_are_the_trainers(temperature, family, server, trainer, figures):
    prompts = random_prompts(64, 12, VOCAB)
    made = generated([server.api], prompts, max_new=32, temperature=temperature, salt=f"v{trainer.version}")
    assert {one.versions[0].version for one in made} == {trainer.version}
    found = trainer.compared(zip(prompts, made, strict=True), temperature)
    figures[f"{family}: 64 requests at temperature {temperature}"] = asdict(found)
    assert found.largest <= 1e-5 and found.compared_fraction > 0.8


def test_numbers_of_a_teacher_on_the_server_are_the_trainers_logprobs(family, server, trainer, figures):
    prompts = random_prompts(8, 12, VOCAB, seed=3)
    made = generated([server.api], prompts, max_new=24, temperature=1.0, salt="teacher")
    groups = [
        Group(prompt=prompt_of(prompt), completions=(completion_of("", one.tokens_T),))
        for prompt, one in zip(prompts, made, strict=True)
    ]
    distill = DistillConfig(teacher=server.url, forward_weight=0.5, top_k=8)
    teachers = ServedTeachers(distill, MODELS[family], lambda: False)
    answers = teachers.answers(teachers.ask(groups))
    teachers.close()
    largest = 0.0
    for prompt, one, (numbers_CW,) in zip(prompts, made, answers, strict=True):
        assert numbers_CW is not None and numbers_CW.shape == (24, 17)
        logprobs, num_sure = trainer.logprobs(prompt, one.tokens_T)
        differences = (numbers_CW[:num_sure, 0].double() - torch.tensor(logprobs[:num_sure]).double()).abs()
        largest = max(largest, float(differences.max())) if num_sure else largest
        top_CK = numbers_CW[:, 9:]
        assert (top_CK.diff(dim=1) <= 0).all() and (top_CK.exp().sum(1) <= 1.01).all()
    figures[f"{family}: teacher"] = largest
    assert largest <= 1e-5


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_weights_arrives_alone(part, family, server, trainer, figures):
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
        running = beside.submit(generated, [server.api], prompts, max_new=480, temperature=0.7, salt="in flight")
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


def test_a_prompt_is_not_answered_from_keys_and_values_of_old_weights(family, server, trainer, figures):
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
def test_the_probe_finds_weights_that_did_not_arrive(fault, family, server, trainer, figures):
    if fault.startswith("a tied") and not MODELS[family].tied_embeddings:
        return
    trainer.randomize(seed=41)
    restored(trainer, server)
    broken = OmittingApi(HttpClient(server.url), vocab_size=VOCAB, request_timeout_s=600, update_timeout_s=600)
    broken.omitted = FAULTS[fault]
    trainer.randomize(seed=42)
    report = trainer.push(broken)
    assert report.living == () and report.failed[server.url].startswith("probe: ")
    # What was left out can be memory that nobody has written, whose logprobs are no numbers (status 400).
    if server.url in report.differences:
        difference = report.differences[server.url]
        figures[f"{family}: probe, {fault}"] = {"largest": difference.largest, "mean": difference.mean}
        assert "does not have the trainer's weights" in report.failed[server.url]
    restored(trainer, server)


LEFT = ("a pause", "an update", "a part of a module", "a sleep", "a sleep without weights", "the weights awake alone")


@pytest.mark.parametrize("left", LEFT)
def test_what_a_dead_trainer_left_is_undone_and_one_whole_push_is_right(
    left, family, server, trainer, tmp_path, figures
):
    """Without abort_update the push after a part of a module is wrong, with status 200 throughout."""
    dead = VllmApi(HttpClient(server.url), vocab_size=VOCAB, request_timeout_s=600, update_timeout_s=600)
    if left in ("a pause", "an update", "a part of a module"):
        dead.pause()
    else:
        dead.sleep(keeps_weights=left == "a sleep")
    if left == "the weights awake alone":
        dead.pause()
    if left in ("an update", "a part of a module"):
        dead.start_update()
    if left == "a part of a module":
        name = "model.layers.0.self_attn.q_proj.weight"
        streamed = WeightStream(trainer.chunks, trainer.mesh, trainer.model)
        (query,) = [bucket.tensors[name].clone() for bucket in streamed if name in bucket.tensors]
        path = tmp_path / "model.safetensors"
        save_file({name: query}, path)
        dead.load({"files": [{"path": str(path), "crc32": crc32_of(path)}]})
        with pytest.raises(ServerError, match="status 500"):
            dead.load({"files": [{"path": str(path), "crc32": "00000000"}]})
    server.api.undo_update()
    trainer.randomize(seed=7)
    report = trainer.push(server.api)
    assert report.living == (server.url,) and report.probe < 2e-4
    figures[f"{family}: probe after {left} of a dead trainer"] = report.probe


def test_a_request_to_a_server_that_sleeps_waits_for_the_weights_of_the_push_that_wakes_it(
    family: str, server: VllmServer, trainer: Trainer, figures: Figures
) -> None:
    """A CPU's memory stays, and everything else is that of `rl.engine.share_gpus`: weights are woken before the push,
    keys and values after it. Prompts of before the sleep are asked again.
    """
    prompts = random_prompts(4, 24, VOCAB, seed=5)
    for version, keeps_weights in enumerate([True, False]):
        trainer.randomize(seed=80 + version)
        assert trainer.push(server.api).living
        generated([server.api], prompts, max_new=4, temperature=1.0, salt="same")
        server.api.sleep(keeps_weights=keeps_weights)
        with ThreadPoolExecutor(1) as beside:
            waiting = beside.submit(generated, [server.api], prompts, max_new=16, temperature=1.0, salt="same")
            sleep(2)
            assert not waiting.done()
            trainer.randomize(seed=90 + version)
            report = trainer.push(server.api)
            made = waiting.result()
        assert report.living == (server.url,) and report.probe < 1e-5
        assert {span.version for one in made for span in one.versions} == {trainer.version}
        found = trainer.compared(zip(prompts, made, strict=True), 1.0)
        figures[f"{family}: requests to a server that sleeps, level {2 - keeps_weights}"] = asdict(found)
        assert found.largest <= 1e-5 and found.compared_fraction > 0.5


def test_the_served_engine_keeps_the_contract_of_engines(server: VllmServer, trainer: Trainer, tmp_path: Path) -> None:
    engine = served_engine(server, trainer, tmp_path, spelled)
    try:
        trainer.version += 1
        engine.update_weights(trainer.version)
        contract.check_all(engine, VOCAB)
    finally:
        engine.close()


def test_masks_and_logprobs_of_conversations_are_those_of_a_pass_over_the_whole_conversation(
    family: str, server: VllmServer, trainer: Trainer, mesh: Mesh, tmp_path: Path, figures: Figures
) -> None:
    """Three batches of the guessing game, each under weights of its own: a turn reads what the server remembers of the
    turns before. The tokenizer has fewer ids than the model; a turn ends by a letter.
    """
    folder = write_tokenizer(tmp_path / "characters")
    config = config_of(
        trainer.model,
        name="guessing",
        arguments={"guesses": 4, "prompt": "0 to {largest}?"},
        max_turns=4,
        max_tokens=400,
    )
    tokenizer, chat = chat_of(config, folder)
    rules = sampling(config, tokenizer)
    engine = served_engine(server, trainer, tmp_path, tokenizer.decode)
    worst, after_ties, num_sampled, num_compared, num_turns = 0.0, 0.0, 0, 0, 0
    try:
        with conversations_of(config, engine, folder, mesh) as conversations:
            for batch in range(3):
                trainer.randomize(seed=51 + batch)
                trainer.version += 1
                engine.update_weights(trainer.version)
                prompts = [game(8 * batch + index) for index in range(8)]
                for group in conversations.hold(prompts, rules, [seeds_of(one) for one in prompts]):
                    for one in group.completions:
                        assert one.episode is not None and {span.version for span in one.versions} == {trainer.version}
                        messages = one.episode.messages
                        said = [message["content"] for message in messages if message["role"] == "assistant"]
                        decoded = [
                            tokenizer.decode([token for token in one.tokens_T[a:b] if token != END])
                            for a, b in one.sampled_spans
                        ]
                        assert decoded == said
                        before = chat.prompt(Conversation(messages=tuple(messages[: 2 * len(said) - 1])))
                        start = one.sampled_spans[-1][0]
                        assert [*group.prompt.tokens_T, *one.tokens_T[:start]] == before
                        ours_T, num_sure = trainer.logprobs(
                            group.prompt.tokens_T, one.tokens_T, vocab_size=tokenizer.vocab_size
                        )
                        sampled_T = torch.zeros(len(ours_T), dtype=torch.bool)
                        for a, b in one.sampled_spans:
                            sampled_T[a:b] = True
                        is_sure_T = sampled_T & (torch.arange(len(ours_T)) < num_sure)
                        apart_T = (torch.tensor(ours_T) - torch.tensor(one.logprobs_T)).abs()
                        worst = max([worst, *apart_T[is_sure_T].tolist()])
                        after_ties = max([after_ties, *apart_T[sampled_T & ~is_sure_T].tolist()])
                        num_sampled += int(sampled_T.sum())
                        num_compared += int(is_sure_T.sum())
                        num_turns += len(said)
    finally:
        engine.close()
    figures[f"{family}: 48 conversations with the guessing game"] = {
        "turns": num_turns,
        "sampled_tokens": num_sampled,
        "largest": worst,
        "compared_fraction": num_compared / num_sampled,
        "after_ties": after_ties,
    }
    assert num_turns > 100 and num_compared > 0.5 * num_sampled
    assert worst <= 1e-5


def game(seed: int) -> Prompt:
    """A problem of the guessing game, whose prompt the environment makes."""
    fields = {"seed": seed, "size": 2}
    return Prompt(problem=Problem(problem_id=str(seed), prompt="", answer="", fields=fields), tokens_T=(1, 2, 3))


def test_generate_writes_what_the_native_engine_writes(family, server, trainer, mesh, tmp_path):
    """`mcore-rl generate --url`, greedily, beside the same command on a checkpoint of the same weights."""
    folder = write_tokenizer(tmp_path / "characters")
    tokenizer = TokenizerConfig(kind="huggingface", path=str(folder))
    config = PretrainConfig(model=trainer.model, data=DataConfig(tokenizer=tokenizer))
    (tmp_path / "config.toml").write_text(dump_config(config))
    trainer.randomize(seed=61)
    assert trainer.push(server.api).living
    save_weights(trainer.chunks, mesh, trainer.model, tmp_path / "checkpoints")
    words = ["generate", "--run", str(tmp_path), "--tokens", "24"]
    for prompt in ("the cat", "7 + 8"):
        native, served = (
            succeed(CLI, [*words, "--prompt", prompt, *more]).stdout for more in ([], ["--url", server.url])
        )
        assert served == native and native != f"{prompt}\n"
