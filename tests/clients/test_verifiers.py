"""A task of verifiers, which the agent of examples/verifiers_agent.py plays by the package's own loop of chat."""

from pathlib import Path

from mcore_rl.megatron.mesh import Mesh
from tests.conversing import chat_of, problems, write_tokenizer
from tests.hf_models import oracle
from tests.sessions import Scripted, agent_config, run_sessions


def test_a_task_of_verifiers_is_a_session_with_its_reward(mesh: Mesh, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    config = agent_config(oracle("qwen3_moe").ours, "", max_tokens=2000, timeout_s=600.0)
    agent = config.rl.agent.model_copy(update={"function": "examples.verifiers_agent:play"})
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"agent": agent})})
    _, chat = chat_of(config, folder)
    # The policy says "a" to every question, which is the answer of the first problem only.
    groups = run_sessions(config, Scripted(lambda _: "a", chat), folder, mesh, problems("a", "b"), group_size=2)
    for group, wanted in zip(groups, (1.0, 0.0), strict=True):
        for one in group.completions:
            assert one.episode is not None and one.episode.failure is None, one.episode
            assert one.episode.reward == wanted and len(one.episode.turns) == 1 and not one.segments
