"""The section `rl.environment`: the environment that answers the policy between its turns."""

from typing import Literal

from pydantic import PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Gibibytes, Seconds, Section


class EnvironmentConfig(Section):
    """An environment that answers the policy, so that a completion has several turns; it runs in its own processes."""

    name: Literal["calculator", "guessing", "python", "reasoning_gym", "textarena"] | Extension | None = None
    """Environment; `calculator`: a tool that computes; `guessing`: a game of guessing a number; `python`: a tool that
    runs Python in a sandbox (bubblewrap); `reasoning_gym`: a dataset of reasoning-gym, in a single turn;
    `textarena`: a game of TextArena for a single player; `module:name`: a class of your own
    (rl.environments.interface.Environment); `none`: no environment, a completion is a single turn."""
    arguments: dict[str, str | bool | int | float] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Arguments of the environment's class, such as dataset = "chain_sum" for `reasoning_gym`."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of the policy; a conversation that reaches it is truncated."""
    max_tokens: PositiveInt = 4096
    """Maximum number of tokens of a conversation after its prompt, including the environment's; a turn that may not
    have room for rl.rollout.max_new_tokens does not begin, and the conversation is truncated."""
    timeout_s: Seconds = 10.0
    """Seconds that the environment may take for each answer; after that it has failed."""
    max_memory_gib: Gibibytes | None = None
    """GiB of address space that a process of the environment, and each that it starts, may take beyond its initial size
    (RLIMIT_AS); `none`: no limit."""
    workers: PositiveInt = 1
    """Processes of each replica that run the environment."""
