"""The section `rl.agent`: a program of the user's that asks the policy over HTTP, as the rollout."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Gibibytes, Seconds, Section, Text


class AgentConfig(Section):
    """An agent: a function or program that knows a base URL, a key and a model name, and asks the policy by an
    OpenAI-compatible API. A session is one run of the agent on one problem; it is one sample.
    """

    function: Extension | None = None
    """`module:name` of a function from rl.agents.run.Run to the reward (a number, {"reward": number}, or None), plain
    or async; it runs in worker processes, and its module is imported before these start; `none`: no function."""
    command: tuple[Text, ...] = ()
    """Program with its arguments, such as ["python", "agent.py"], instead of `function`. It gets OPENAI_BASE_URL and
    OPENAI_API_KEY, the same for ANTHROPIC, MCORE_RL_MODEL, MCORE_RL_SEED, the empty folder MCORE_RL_FOLDER, and the
    problem as JSON on its standard input, and writes {"reward": number} to the file MCORE_RL_RESULT."""
    arguments: dict[str, str | bool | int | float] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Values that the agent gets beside its problem."""
    sessions: PositiveInt = 16
    """Sessions of each replica that run at a time, each in a process."""
    timeout_s: Seconds = 600.0
    """Seconds that a session may take; after that it has failed, and its processes are ended."""
    max_memory_gib: Gibibytes | None = None
    """GiB of address space that a process of a session, and each that it starts, may take beyond its initial size
    (RLIMIT_AS); `none`: no limit."""
    max_calls: PositiveInt = 64
    """Maximum number of the policy's answers in a session; one more is refused, and the sample truncated."""
    max_tokens: PositiveInt = 4096
    """Maximum number of tokens of a session after its prompt, over all its segments; a request without room is refused
    with the code context_length_exceeded."""
    branches: Literal["train", "fail"] = "train"
    """Effect of a request that extends no earlier one, because the agent has changed its history or starts another
    agent; `train`: it begins a segment of the same sample; `fail`: the session has failed."""
    sampling: Literal["override", "refuse"] = "override"
    """Effect of a temperature, top_p, top_k, min_p or seed in a request that differs from the run's; `override`: the
    run's is used; `refuse`: the request is refused."""
    tool_format: Literal["auto", "hermes", "xml", "llama3", "mistral", "deepseek", "glm", "kimi"] = "auto"
    """Format in which the policy calls the tools of a request; `auto`: that of the chat template."""
    model: Text = "policy"
    """Name of the model that requests must have."""
    host: Text = "127.0.0.1"
    """Interface at which the endpoint listens, without encryption. Others than 127.0.0.1 are open to the network."""
    port: NonNegativeInt = 0
    """Port of the first replica; each further replica has the next one; 0: any free port."""
    window_s: NonNegativeFloat = 0.02
    """Seconds that the engine in the training processes waits for further requests to generate as a batch."""

    @property
    def is_on(self) -> bool:
        """Whether an agent is named."""
        return self.function is not None or bool(self.command)
