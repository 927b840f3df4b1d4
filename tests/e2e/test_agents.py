"""A run with an agent as a user does it: routes of the engine over segments, samples, evaluation, and a resume; the
same through servers, and as an environment.
"""

import json
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from mcore_rl.api import read_metrics
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.rollouts.prompts import make_problem
from tests.e2e.conftest import CHARACTERS
from tests.e2e.test_rl import SERVED, computed
from tests.fake_server import Asked, FakeServer
from tests.forked import succeed
from tests.served_model import two_servers

WORDS = (
    *("mesh.tp=1", "mesh.ep=1", "train.steps=8", "train.eval_interval=8", "checkpoint.interval=4"),
    *("rl.samples.interval=1", "rl.agent.sessions=4", "rl.agent.max_tokens=80", 'rl.reward.parts=["environment"]'),
    *("rl.reward.length_max_tokens=none", "rl.loss.kl_coeff=0", "rl.loss.reference_refresh_rollouts=none"),
    f"rl.rollout.stop_tokens={list(range(11, 31))}",
)


@pytest.mark.matrix("tests.sessions:compacting-r2")
@pytest.mark.parametrize(("agent", "replay"), [("examples.agent:solve", "r3"), ("tests.sessions:compacting", "r2")])
def test_a_run_with_an_agent_is_bit_equal_after_a_resume(
    agent: str, replay: str, rl_file: Path, tmp_path: Path
) -> None:
    run_dir, words = tmp_path / "rl", [*WORDS, f"rl.agent.function={agent}", f"replay.kind={replay}"]
    # Two rollouts, and between them a save.
    words += ["train.steps=4", "train.eval_interval=4", "checkpoint.interval=2"]
    succeed("mcore_rl.programs.rl", [rl_file, *words])
    wanted = computed(run_dir)
    metrics = read_metrics(run_dir)
    assert max(metrics["rollout/mismatch_max"].values()) < 1e-4
    assert set(metrics["environment/ended_failed_fraction"].values()) == {0.0}
    assert min(metrics["environment/turns"].values()) >= 2 and "eval/reward" in metrics
    samples = [json.loads(line) for line in (run_dir / "samples/step_0000000.jsonl").read_text().splitlines()]
    assert all(len(one["spans"]) == 2 + len(one.get("segments", ())) for one in samples)
    assert all(one["turns"][-1]["role"] == "assistant" for one in samples)
    assert any("segments" in one for one in samples) == (agent == "tests.sessions:compacting")
    if replay == "r3":
        assert max(metrics["rollout_routes/disjoint_fraction"].values()) == 0.0

    shutil.rmtree(run_dir / "checkpoints/iter_0000004")
    (run_dir / "DONE").unlink()
    succeed("mcore_rl.programs.rl", [rl_file, *words])
    assert computed(run_dir) == wanted


SMALL = (
    *(*WORDS, "train.steps=6", "checkpoint.interval=none", "train.global_batch=8", "replay.kind=r3"),
    *("rl.rollout.prompts_per_step=4", "rl.rollout.group_size=4", "rl.agent.sessions=8"),
    "rl.agent.function=tests.sessions:compacting",
)


@pytest.mark.full
def test_losses_of_an_agent_through_servers_are_those_of_the_native_engine(
    rl_file: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """Sessions of two segments with routes; a server breaks an answer once, which the agent does not notice."""
    succeed("mcore_rl.programs.rl", [rl_file, *SMALL])
    wanted = computed(tmp_path / "rl", SERVED)
    assert len(wanted) == 7 and any(numbers.get("policy/loss") for numbers in wanted.values())
    with two_servers(load_config(RlRunConfig, rl_file, SMALL).model, mesh) as (servers, words):
        servers[0].faults = [("/inference/v1/generate", "null_logprob")]
        succeed("mcore_rl.programs.rl", [rl_file, *SMALL, *words, f"run_dir={tmp_path / 'served'}"])
        assert all(server.rollouts() for server in servers)
    found = computed(tmp_path / "served", SERVED)
    assert found.keys() == wanted.keys()
    for step, numbers in wanted.items():
        assert found[step] == pytest.approx(numbers, rel=1e-4, abs=1e-6)
    metrics = read_metrics(tmp_path / "served")
    assert max(metrics["rollout/mismatch_max"].values()) < 1e-4
    assert set(metrics["environment/ended_failed_fraction"].values()) == {0.0}


class Straddled:
    """An order of requests and updates of weights in which every rollout batch but the first has sessions that ask
    before an update and after it, however fast servers, agents and the policy are: second requests wait for the update
    that trains on the batch before, whose third requests wait for a second one. A batch is a policy update.
    """

    def __init__(self, config: RlRunConfig) -> None:
        size, self.last = config.rl.rollout.prompts_per_step, config.train.steps - 1
        problems = (make_problem(config.rl.prompts, config.train.seed, n) for n in range(size * config.train.steps))
        self.batches = {problem.prompt: n // size for n, problem in enumerate(problems)}
        assert len(self.batches) == size * config.train.steps
        self.letters = dict(enumerate(CHARACTERS))
        self.asked_twice: set[int] = set()

    def __call__(self, server: FakeServer, asked: Asked) -> None:
        prompt, _, rest = "".join(self.letters.get(token, "?") for token in asked.prompt).partition("=")
        batch = self.batches.get(f"{prompt}=")
        if batch is None or not rest:  # of an evaluation, or a first request
            return
        if rest.endswith("more"):
            self.asked_twice.add(batch)
            while int(server.version.partition("-")[0].removeprefix("v")) < batch and not server.ended.is_set():
                time.sleep(0.01)
        else:
            while batch < self.last and batch + 1 not in self.asked_twice and not server.ended.is_set():
                time.sleep(0.01)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_sessions_that_run_while_the_policy_trains_have_tokens_of_the_bound_and_its_versions(
    kind: str, rl_file: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """Sessions of two segments, of which some began before an update of the weights and went on after it."""
    # Without replay: an engine's pass over an older turn may choose other experts than those that are recorded for it.
    stale = ["rl.rollout.max_staleness=1", "rl.loss.importance_sampling=truncate", "replay.kind=none", "optim.lr=1e-2"]
    # The sessions of two batches run at a time, so that none waits for one that has not begun.
    stale += ["train.steps=4", "rl.rollout.prompts_per_step=2", "rl.agent.sessions=16"]
    config = load_config(RlRunConfig, rl_file, [*SMALL, *stale])
    order = Straddled(config)
    with two_servers(config.model, mesh, kind) as (servers, words):
        for server in servers:
            server.before_answer = partial(order, server)
        succeed("mcore_rl.programs.rl", [rl_file, *SMALL, *words, *stale])
    metrics = read_metrics(tmp_path / "rl")
    assert 0 < max(metrics["rollout/staleness_max"].values()) <= 1
    assert max(metrics["rollout/mixed_versions_fraction"].values()) > 0
    assert 0 < max(metrics["rollout/stale_fraction"].values()) <= 1
    assert set(metrics["environment/ended_failed_fraction"].values()) == {0.0}
    # Tokens of the weights that are trained agree with the trainer's, and only these.
    assert max(metrics["rollout/mismatch_kl_current_nats"].values()) < 1e-6
    lines = [line for path in (tmp_path / "rl/samples").iterdir() for line in path.read_text().splitlines()]
    samples = [json.loads(line) for line in lines]
    falling = [
        one
        for one in samples
        for before, after in zip(one["versions"], one["versions"][1:], strict=False)
        if after[0] < before[0]
    ]
    assert all("segments" in one for one in falling)
    assert any(len({version for version, *_ in one["versions"]}) > 1 for one in samples)


AS_AGENT = """
import urllib.request, json
from examples.environment import Retry
from mcore_rl.rl.agents.session import Session
from mcore_rl.rl.environments.conversations import turn_seed

Session.next_seeds = lambda session, *_: [turn_seed(session.seed, len(session.calls))]

def solve(run):
    environment = Retry(tries=2)
    messages, reward, is_done = [*environment.start(run.problem)], 0.0, False
    while not is_done:
        body = json.dumps({"model": run.model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {run.api_key}"}
        request = urllib.request.Request(f"{run.base_url}/chat/completions", body, headers)
        choice = json.load(urllib.request.urlopen(request))["choices"][0]
        replies, turn_reward, is_done = environment.step(choice["message"]["content"])
        messages += [choice["message"], *replies]
        reward += turn_reward
        is_done |= choice["finish_reason"] == "length"
    return reward
"""
"""The task of an environment as an agent, with the seeds of the environment's turns."""


@pytest.mark.full
def test_losses_through_the_endpoint_are_those_of_the_same_task_as_an_environment(
    rl_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO with routes of the engine (R3), which a task with two turns of the policy learns from."""
    (tmp_path / "as_agent.py").write_text(AS_AGENT)
    monkeypatch.chdir(tmp_path)
    same = [word for word in WORDS if "agent" not in word and "reward.parts" not in word]
    same += ["replay.kind=r3", "checkpoint.interval=none", "train.steps=4"]
    same += ['rl.reward.parts=["environment","positions"]']
    environment = ["rl.environment.name=examples.environment:Retry", "rl.environment.arguments={tries=2}"]
    environment += ["rl.environment.max_turns=3", "rl.environment.max_tokens=80"]
    succeed("mcore_rl.programs.rl", [rl_file, *same, *environment])
    agent = ["rl.agent.function=as_agent:solve", "rl.agent.sessions=4", "rl.agent.max_tokens=80"]
    agent.append(f"run_dir={tmp_path / 'agent'}")
    succeed("mcore_rl.programs.rl", [rl_file, *same, *agent])
    wanted, found = computed(tmp_path / "rl"), computed(tmp_path / "agent")
    assert len(wanted) == 5 and any(numbers.get("policy/loss") for numbers in wanted.values())
    assert max(read_metrics(tmp_path / "agent")["environment/turns"].values()) > 1.2
    assert found.keys() == wanted.keys()
    for step, numbers in wanted.items():
        assert found[step] == pytest.approx(numbers, abs=1e-6), step
