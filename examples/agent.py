"""An agent of your own: rl.agent.function = "examples.agent:solve", rl.reward.parts = ["environment"].

Any client of OpenAI's API will do; here Python's own HTTP client asks. The policy may correct a wrong answer once.
"""

import json
import urllib.request
from collections.abc import Mapping, Sequence

from mcore_rl.rl.agents.run import Run


def ask(run: Run, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the policy's answer to the messages."""
    request = urllib.request.Request(
        f"{run.base_url}/chat/completions",
        json.dumps({"model": run.model, "messages": list(messages)}).encode(),
        {"Authorization": f"Bearer {run.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def solve(run: Run) -> float:
    """Return the share of right characters in the better of two tries."""
    messages = [{"role": "user", "content": run.problem.prompt}]
    rewards = []
    for _ in range(2):
        text = ask(run, messages)
        right = sum(given == wanted for given, wanted in zip(text, run.problem.answer, strict=False))
        rewards.append(right / len(run.problem.answer))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{right} right="}]
    return max(rewards)
