"""The section `rl.agent`: a program of the user's that asks the policy over HTTP, as the rollout."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Gibibytes, Seconds, Section, Text


class AgentConfig(Section):
    """An agent: a function or program of yours that gets a base URL, a key and a model name, and queries the policy
    over an OpenAI-compatible API. A session is one run of the agent on one problem; it is one sample.
    """

    function: Extension | None = None
    """`module:name` of a plain or async function from rl.agents.run.Run to the reward (a number, {"reward": number}, or
    None). It runs in worker processes; its module is imported before they start. `none`: no function."""
    command: tuple[Text, ...] = ()
    """Program with its arguments, such as ["python", "agent.py"], instead of `function`. It gets OPENAI_BASE_URL and
    OPENAI_API_KEY, the same for ANTHROPIC, MCORE_RL_MODEL, MCORE_RL_SEED, the empty folder MCORE_RL_FOLDER, and the
    problem as JSON on its standard input. It writes {"reward": number} to the file MCORE_RL_RESULT."""
    arguments: dict[str, str | bool | int | float] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Values that the agent gets with its problem."""
    sessions: PositiveInt = 16
    """Number of sessions that run at a time on each replica, each in its own process."""
    timeout_s: Seconds = 600.0
    """Seconds that a session may take; after that it has failed, and its processes are ended."""
    max_memory_gib: Gibibytes | None = None
    """Address space in GiB (RLIMIT_AS) that each process of a session may take beyond its initial size, including the
    processes that it starts; `none`: no limit."""
    max_calls: PositiveInt = 64
    """Maximum number of the policy's answers in a session; after that requests are refused and the sample truncated."""
    max_tokens: PositiveInt = 4096
    """Maximum number of tokens of a session after its prompt, over all its segments. A request that does not fit is
    refused with the code context_length_exceeded."""
    branches: Literal["train", "fail"] = "train"
    """Reaction to a request that extends no earlier request, because the agent has changed its history or starts
    another agent. `train`: it begins a new segment of the same sample. `fail`: the session fails."""
    sampling: Literal["override", "refuse"] = "override"
    """Reaction to a request whose temperature, top_p, top_k, min_p or seed differs from the run's. `override`: use the
    run's. `refuse`: refuse the request."""
    tool_format: Literal["auto", "hermes", "xml", "llama3", "mistral", "deepseek", "glm", "kimi"] = "auto"
    """Format in which the policy calls the tools of a request; `auto`: the chat template's."""
    model: Text = "policy"
    """Model name that requests must have."""
    host: Text = "127.0.0.1"
    """Interface on which the endpoint listens, without encryption. Any value except 127.0.0.1 opens it to the
    network."""
    port: NonNegativeInt = 0
    """Port of the first replica; each further replica uses the next port. 0: any free port."""
    window_s: NonNegativeFloat = 0.02
    """Seconds that the engine in the training processes waits for more requests, to generate them as a batch."""

    @property
    def is_on(self) -> bool:
        """Whether an agent is named."""
        return self.function is not None or bool(self.command)
