"""Reinforcement learning whose completions come from servers: the losses of the native engine, with its routes (R3)."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.families import weight_map
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.build import copy_in
from mcore_rl.model.hf_stream import WeightStream
from mcore_rl.rl.rollouts.rollout import sample_seed
from mcore_rl.storage.checkpoint import find_checkpoint
from tests.conversion import read_dist
from tests.e2e.test_resume import running, wait_for_step
from tests.e2e.test_rl import SERVED, computed
from tests.emitted import assert_emitted
from tests.fake_server import GENERATE, Asked, FakeServer, TableAnswers
from tests.forked import begin_main, run_main, succeed
from tests.generating import loaded
from tests.served_model import ModelAnswers, two_servers

ROOT = Path(__file__).parents[2]
SMALL = (
    *("mesh.tp=1", "mesh.ep=1", "train.steps=4", "train.global_batch=8", "train.eval_interval=4"),
    *("checkpoint.interval=none", "rl.rollout.prompts_per_step=4", "rl.rollout.group_size=4", "replay.kind=r3"),
    *("rl.samples.interval=none", "rl.loss.kl_coeff=0", "rl.loss.reference_refresh_rollouts=none"),
)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [(), ("lora.rank=8", "optim.lr=1e-2", "model.moe.balance=none")], ids=["whole", "adapters"]
)
def test_losses_through_servers_are_those_of_the_native_engine(
    changes: tuple[str, ...], rl_file: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """Two servers that begin with other weights; one of them breaks a completion and an update once. Low-rank adapters
    come to them added to the weights.
    """
    small = (*SMALL, *changes)
    succeed("mcore_rl.programs.rl", [rl_file, *small])
    wanted = computed(tmp_path / "rl", SERVED)
    assert len(wanted) == 5 and any(numbers.get("policy/loss") for numbers in wanted.values())

    with two_servers(load_config(RlRunConfig, rl_file, small).model, mesh) as (servers, words):
        servers[0].faults = [("/inference/v1/generate", "null_logprob"), ("/reset_prefix_cache", "no_success")]
        engine = [*words, f"run_dir={tmp_path / 'served'}"]
        run = succeed("mcore_rl.programs.rl", [rl_file, *small, *engine])
        found = computed(tmp_path / "served", SERVED)
        assert found.keys() == wanted.keys()
        for step, numbers in wanted.items():
            assert found[step] == pytest.approx(numbers, rel=1e-4, abs=1e-6)
        assert_emitted("rl through servers", tmp_path / "served")
        if changes:
            assert_emitted("rl of adapters through servers", tmp_path / "served")
        assert f"{servers[0].url} is left out: reset of the caches" in run.stdout
        # Each has computed a part of the completions: how many is a matter of speed.
        assert all(server.rollouts() for server in servers)
        status = json.loads((tmp_path / "served/servers/status.json").read_text())
        assert status["version"] == 4 and [one["is_serving"] for one in status["servers"]] == [True, True]

        evaluated = succeed("mcore_rl.cli.evaluate", [rl_file, *small, *engine])
        result = json.loads(evaluated.stdout.splitlines()[-1])
        assert result["eval/reward"] == pytest.approx(wanted[4]["eval/reward"], abs=1e-6)

        servers[0].version = f"v4-00000000@{(tmp_path / 'served').resolve()}"  # as of a run that trains
        refused = run_main("mcore_rl.cli.evaluate", [rl_file, *small, *engine])
        assert refused.returncode and f"belongs to the run {(tmp_path / 'served').resolve()}" in refused.stderr


@pytest.mark.full
def test_a_server_with_vllms_default_logprobs_ends_a_run_at_another_temperature_before_its_first_rollout(
    rl_file: Path, tmp_path: Path, mesh: Mesh
) -> None:
    model = load_config(RlRunConfig, rl_file, SMALL).model
    zeros = {name: torch.zeros(shape) for name, shape in weight_map(model).hf_shapes.items()}
    with FakeServer(ModelAnswers(loaded(model, zeros, mesh), mesh, model, zeros)) as server:
        words = ("rl.engine.kind=vllm", f'rl.engine.urls=["{server.url}"]', "rl.rollout.temperature=0.7")
        run = run_main("mcore_rl.programs.rl", [rl_file, *SMALL, *words])
        assert run.returncode == 2 and server.rollouts() == [], run.stderr
        assert "Start vLLM with --logprobs-mode processed_logprobs" in run.stderr
        server.logprobs_mode = "processed_logprobs"
        run = run_main("mcore_rl.programs.rl", [rl_file, *SMALL, *words, "train.steps=2"])
        assert run.returncode == 0 and server.rollouts(), run.stderr


@pytest.mark.full
def test_losses_through_servers_that_load_adapters_are_those_of_the_native_engine(
    rl_file: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """Two servers that have the base."""
    small = (*SMALL, "lora.rank=8", "optim.lr=1e-2", "model.moe.balance=none")
    succeed("mcore_rl.programs.rl", [rl_file, *small])
    wanted = computed(tmp_path / "rl", SERVED)
    saved = read_dist(find_checkpoint(tmp_path / "rl"))
    base = {key: saved[key] for key in saved if not key.startswith("optimizer.") and ".adapter." not in key}
    model = load_config(RlRunConfig, rl_file, small).model
    zeros = {name: torch.zeros(shape) for name, shape in weight_map(model).hf_shapes.items()}
    chunks = loaded(model, zeros, mesh)
    copy_in(chunks, base)
    weights = {
        name: tensor.clone() for bucket in WeightStream(chunks, mesh, model) for name, tensor in bucket.tensors.items()
    }
    with two_servers(model, mesh, weights=weights) as (servers, words):
        engine = [*words, "rl.engine.lora=adapter", f"run_dir={tmp_path / 'served'}"]
        succeed("mcore_rl.programs.rl", [rl_file, *small, *engine])
        assert not any("update_weights" in path for server in servers for path in server.paths())
        assert all(server.rollouts() for server in servers)
        assert [len(server.adapters) for server in servers] == [1, 1]
        found = computed(tmp_path / "served", SERVED)
        assert found.keys() == wanted.keys()
        for step, numbers in wanted.items():
            assert found[step] == pytest.approx(numbers, rel=1e-4, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "computes_again"), [("vllm", True), ("sglang", True), ("vllm", False)])
def test_routes_of_newer_weights_at_older_tokens_are_warned_of_though_the_server_says_nothing(
    kind: str, computes_again: bool, rl_file: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """A server has sampled its completions when an update comes, and reads their routes after it, or before."""
    config = load_config(RlRunConfig, rl_file, SMALL)
    with two_servers(config.model, mesh, kind) as ((older, newer), words):
        # Not those of the first batch, without which nothing is trained, nor of an evaluation.
        seeds = {sample_seed(config.train.seed, prompt, index) for prompt in range(16, 96) for index in range(4)}

        def after_an_update(server: FakeServer, asked: Asked) -> None:
            """Wait for the next update."""
            while asked.seed in seeds and asked.salt.endswith(server.version.partition("-")[0]):
                time.sleep(0.01)
            seeds.discard(asked.seed)

        newer.before_answer = partial(after_an_update, newer)
        if computes_again:
            older.tokens_before_pause = 12
            older.before_answer = partial(after_an_update, older)
        words += ["rl.rollout.max_staleness=1", "train.eval_interval=none", "train.steps=6"]
        words += ["rl.loss.importance_sampling=truncate"]
        words += ["train.global_batch=64", "rl.rollout.prompts_per_step=16", "optim.lr=1e-2"]
        words += ["rl.reward.length_min_tokens=11", "rl.reward.length_max_tokens=12", "rl.engine.requests=128"]
        run = run_main("mcore_rl.programs.rl", [rl_file, *SMALL, *words])
    assert run.returncode == 0, run.stderr
    # vLLM keeps the routes of each step, although it computes tokens again.
    is_warned = computes_again and kind == "sglang"
    assert ("tokens that older weights sampled agree with the present weights'" in run.stdout) == is_warned


WAITS = (
    *("/weight_info", "/update_weight_version", "/pause", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/reset_prefix_cache", "/resume", "probe", GENERATE["vllm"]),
)
"""Calls of a start, an update and a rollout batch, each of which waits for a server."""


@pytest.mark.full
def test_sigterm_ends_a_run_within_seconds_in_whatever_wait_for_a_server_and_its_next_start_goes_on(
    rl_file: Path, tmp_path: Path
) -> None:
    """A server that hangs in each of its calls in turn, once a step is made where that can be."""
    run_dir = tmp_path / "run"
    words = [rl_file, *SMALL, f"run_dir={run_dir}", "train.steps=2000", "train.eval_interval=none", "replay.kind=none"]
    words += ["rl.engine.kind=vllm", "rl.engine.probe_tolerance=1e9", "rl.engine.attempts=1"]
    hung = threading.Event()
    saved = -1
    with FakeServer(TableAnswers(48), on_hang=lambda _: hung.set()) as server:
        words.append(f'rl.engine.urls=["{server.url}"]')
        for number, path in enumerate(WAITS):
            hung.clear()
            is_first = path in ("/weight_info", "/update_weight_version")
            passed = 0 if is_first else {"/update_weights": 12, "probe": 40}.get(path, 3)
            server.faults = [(path, "none")] * passed + [(path, "hang")]
            output = tmp_path / f"out_{number}"
            run = begin_main("mcore_rl.programs.rl", words, output)
            assert hung.wait(120), output.read_text()
            sent_s = time.monotonic()
            assert run.pid is not None
            os.kill(run.pid, signal.SIGTERM)
            run.join(60)
            assert run.exitcode == 0 and time.monotonic() - sent_s < 20, (path, output.read_text())
            where = "before the first step" if is_first else "after step "
            assert f"stopping {where}" in output.read_text() and "SIGTERM came" in output.read_text()
            steps = [int(one.name.removeprefix("iter_")) for one in (run_dir / "checkpoints").glob("iter_*")]
            assert is_first or max(steps) >= saved, path
            saved = max(steps, default=-1)
    assert saved > 0


@pytest.mark.full
def test_ctrl_c_saves_and_a_second_one_ends_at_once_and_both_end_the_servers_that_the_run_started(
    rl_file: Path, tmp_path: Path
) -> None:
    """Groups are in progress beside the training; the same command resumes, and is then ended by two Ctrl-C."""
    run_dir = tmp_path / "run"
    server = json.dumps([sys.executable, str(ROOT / "tests/fake_server.py")])
    words = ["rl", rl_file, *SMALL, f"run_dir={run_dir}", "train.steps=2000", "replay.kind=none"]
    words += ["rl.engine.kind=vllm", "rl.engine.count=2", f"rl.engine.command={server}"]
    words += ["rl.engine.probe_tolerance=1e9"]  # the servers answer from a table
    words += ["rl.rollout.max_staleness=1", "rl.loss.importance_sampling=truncate"]
    last = "Stopped by Ctrl-C, and saved. The same command goes on from there."
    output = interrupted(words, run_dir, tmp_path / "first", after_step=4, times=1)
    assert output.splitlines()[-1] == last
    (saved,) = (run_dir / "checkpoints").glob("iter_*")
    step = int(saved.name.removeprefix("iter_"))
    output = interrupted(words, run_dir, tmp_path / "second", after_step=step + 2, times=2)
    assert f"resumed from {saved}" in output
    assert output.splitlines()[-1] == "Ended at once. The same command goes on from the last complete checkpoint."


def interrupted(words: Sequence[object], run_dir: Path, output: Path, *, after_step: int, times: int) -> str:
    """Run a command, press Ctrl-C `times` times once a step is in the log, and return its output; it has to end its
    servers.
    """
    with running(words, output) as run:
        wait_for_step(run_dir, after_step, run)
        servers = [one for one in psutil.Process(run.pid).children(recursive=True) if is_fake_server(one)]
        assert len(servers) >= 2
        run.send_signal(signal.SIGINT)
        if times == 2:
            while "press it again to end at once" not in run.text:
                assert run.poll() is None, run.text
                time.sleep(0.02)
            run.send_signal(signal.SIGINT)
        assert run.wait() == 130 and "Traceback" not in run.text, run.text
        _, left = psutil.wait_procs(servers, timeout=120)
        assert not left
        return run.text


def is_fake_server(process: psutil.Process) -> bool:
    return any(word.endswith("fake_server.py") for word in process.cmdline())


def weights_of_run(run_dir: Path, config: RlRunConfig, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors of a run's last checkpoint."""
    saved = read_dist(find_checkpoint(run_dir))
    zeros = {name: torch.zeros(shape) for name, shape in weight_map(config.model).hf_shapes.items()}
    chunks = loaded(config.model, zeros, mesh)
    copy_in(chunks, {key: saved[key] for key in saved if not key.startswith("optimizer.")})
    stream = WeightStream(chunks, mesh, config.model)
    return {name: tensor.clone() for bucket in stream for name, tensor in bucket.tensors.items()}


TAUGHT = ("rl.advantage.kind=zero", "replay.kind=none", "train.eval_interval=none", "rl.loss.entropy_coeff=0")


@pytest.mark.full
def test_losses_with_a_teacher_on_a_server_are_those_of_the_teacher_in_the_trainer(
    rl_file: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """As an advantage with vLLM, and in the loss with SGLang on two ranks, with a first answer that lacks a number."""
    config = load_config(RlRunConfig, rl_file, SMALL)
    teacher = tmp_path / "teacher"
    succeed("mcore_rl.programs.rl", [rl_file, *SMALL, f"run_dir={teacher}", "train.steps=2", "optim.lr=1e-2"])
    weights = weights_of_run(teacher, config, mesh)
    tokenizer = load_tokenizer(config.data.tokenizer)
    names = (*SERVED, "teacher/kl_nats", "teacher/clamped_fraction")
    for kind, changes, num_ranks in (("vllm", (), 1), ("sglang", ("rl.distill.use=loss", "mesh.pp=2"), 2)):
        words = [rl_file, *SMALL, *TAUGHT, *changes]
        own = tmp_path / f"own_{kind}"
        succeed("mcore_rl.programs.rl", [*words, f"rl.distill.teacher={teacher}", f"run_dir={own}"], num_ranks)
        wanted = computed(own, names)
        assert all(numbers["teacher/kl_nats"] > 1e-3 for numbers in wanted.values()) and len(wanted) == 4
        answers = ModelAnswers(loaded(config.model, weights, mesh), mesh, config.model, weights)
        answers.scored_ids = tokenizer.vocab_size
        with FakeServer(answers, kind, tokenizer=tokenizer, model_name="big") as server:
            served = tmp_path / f"served_{kind}"
            words += [f"rl.distill.teacher={server.url}", f"rl.distill.server.kind={kind}", f"run_dir={served}"]
            # The first 24 requests are the probe's.
            server.faults = [("probe", "none")] * 24 + [("probe", "null_logprob"), ("probe", "cut_short")]
            run = succeed("mcore_rl.programs.rl", words, num_ranks)
            found = computed(served, names)
            assert found.keys() == wanted.keys()
            for step, numbers in wanted.items():
                assert found[step] == pytest.approx(numbers, rel=1e-6, abs=1e-6), (kind, step)
            assert f"teacher: {server.url}, which has big (big)" in run.stdout
            retried = computed(served, ("teacher/retried_requests",))
            assert sum(numbers["teacher/retried_requests"] for numbers in retried.values()) == 2
            if num_ranks == 1:
                (served / "DONE").unlink()
                server.model_name = "another"
                again = run_main("mcore_rl.programs.rl", [*words, "train.steps=6"])
                assert again.returncode and "rl.distill.server is" in again.stderr, again.stderr
            both = tmp_path / f"both_{kind}"
            more = ("rl.distill.forward_weight=0.5", "rl.distill.top_k=8", "train.steps=2", f"run_dir={both}")
            succeed("mcore_rl.programs.rl", [*words, *more], num_ranks)
            forward = computed(both, ("teacher/forward_kl_nats",))
            assert len(forward) == 2 and all(n["teacher/forward_kl_nats"] > 1e-3 for n in forward.values())
            assert_emitted("rl with a served teacher", both)
