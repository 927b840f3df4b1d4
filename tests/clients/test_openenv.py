"""An episode of a real OpenEnv server, whose environment the agent of examples/openenv_agent.py plays."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from mcore_rl.megatron.mesh import Mesh
from tests.conversing import chat_of, problems, write_tokenizer
from tests.hf_models import oracle
from tests.sessions import Scripted, agent_config, run_sessions


class Said(Action):
    text: str


class Asked(Observation):
    text: str = ""


class Counting(Environment):  # type: ignore[type-arg]
    """Asks three times for the number of the turn, and rewards each right one by a half."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Asked:
        self.turn = 0
        return Asked(text="turn 1", done=False, reward=0.0)

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Asked:
        self.turn += 1
        right = action.text == str(self.turn)
        return Asked(text=f"turn {self.turn + 1}", done=self.turn == 3, reward=0.5 * right)

    @property
    def state(self) -> State:
        return State(step_count=self.turn)


@pytest.fixture
def url() -> Iterator[str]:
    app = create_fastapi_app(Counting, Said, Asked, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_an_episode_of_openenv_is_a_session_with_its_rewards(url: str, mesh: Mesh, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    config = agent_config(oracle("qwen3_moe").ours, "", arguments={"url": url}, max_tokens=2000)
    agent = config.rl.agent.model_copy(update={"function": "examples.openenv_agent:play"})
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"agent": agent})})
    _, chat = chat_of(config, folder)
    # Right in the first and third turn.
    engine = Scripted(lambda asked: {1: "1", 2: "?", 3: "3"}[asked.count("u:")], chat)
    (group,) = run_sessions(config, engine, folder, mesh, problems("a"), group_size=2)
    for one in group.completions:
        assert one.episode is not None and one.episode.failure is None, one.episode
        assert one.episode.reward == 1.0 and len(one.episode.turns) == 3 and not one.segments
