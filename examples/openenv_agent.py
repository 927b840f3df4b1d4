"""An environment of OpenEnv as an agent: rl.agent.function = "examples.openenv_agent:play".

It runs at a server of its own: rl.agent.arguments = {url = "http://localhost:8000"}. Its observations are read as text
from the field `text`, which its actions have too; name yours. A session keeps its connection, which is its episode.
"""

from openenv.core import GenericEnvClient

from examples.agent import ask
from mcore_rl.rl.agents.run import Run


def play(run: Run) -> float:
    """Return the sum of the rewards of an episode."""
    messages: list[dict[str, str]] = []
    reward = 0.0
    with GenericEnvClient(base_url=str(run.arguments["url"])).sync() as environment:
        result = environment.reset(seed=run.seed)
        while not result.done:
            messages.append({"role": "user", "content": str(result.observation["text"])})
            text = ask(run, messages)
            messages.append({"role": "assistant", "content": text})
            result = environment.step({"text": text})
            reward += float(result.reward or 0.0)
    return reward
