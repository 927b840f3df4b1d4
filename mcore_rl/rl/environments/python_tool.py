"""A tool that runs Python programs of the policy in a sandbox (`rl.rewards.sandbox`)."""

import functools
from functools import partial

from mcore_rl.rl.environments.tools import Tool
from mcore_rl.rl.rewards.sandbox import Sandbox, SandboxLimits
from mcore_rl.rl.workers.failure import cut

HELP = (
    "You can run Python: write a program between ```python and ```, end your turn, and read what it prints. Each "
    "program begins anew. When you know the answer, write it without a program."
)


class PythonTool(Tool):
    """A tool that returns what a Python program prints."""

    def __init__(
        self,
        begin: str = "```python",
        end: str = "```",
        help: str = HELP,
        role: str = "tool",
        seconds: float = 5.0,
        memory_mib: int = 512,
        max_characters: int = 2000,
    ) -> None:
        """Take the tool's limits.

        Args:
            begin: mark before a program.
            end: mark after it.
            help: system message; empty: there is none.
            role: role of the messages with results.
            seconds: time of a program; less than rl.environment.timeout_s.
            memory_mib: address space of a program, and size of the files that it may write.
            max_characters: most characters of a result; what is longer is cut in the middle.

        Raises:
            ConfigError: where there is no sandbox on this machine, or it does not work.
        """
        limits = SandboxLimits(time_s=float(seconds), memory_mib=memory_mib)
        run = partial(run_program, limits=limits, max_characters=max_characters)
        super().__init__(run, begin=begin, end=end, help=help, role=role)
        sandbox_of(limits)


@functools.cache
def sandbox_of(limits: SandboxLimits) -> Sandbox:
    """Return the sandbox of this machine, which is tried once; worker processes inherit it."""
    return Sandbox("auto", field="rl.environment.name", limits=limits)


def run_program(program: str, *, limits: SandboxLimits, max_characters: int) -> str:
    """Return what a program prints in the sandbox, with its errors, and how it ended unless it ended well."""
    result = sandbox_of(limits).run(program)
    if result.is_timeout:
        ended = f"(ended after {limits.time_s:g} s)"
    else:
        ended = f"(ended with status {result.status})" if result.status else ""
    printed = cut(f"{result.output}{result.errors}".strip(), max_characters)
    return "\n".join(filter(None, (printed, ended))) or "(no output)"
