"""A tool that runs the policy's Python programs in a sandbox (`rl.rewards.sandbox`)."""

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
    """A tool that runs a Python program and returns its output."""

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
        """Create the tool and try its sandbox.

        Args:
            begin: mark before a program.
            end: mark after a program.
            help: system message; empty: no system message.
            role: role of the messages with results.
            seconds: time limit of a program in seconds; keep it below rl.environment.timeout_s.
            memory_mib: limit on a program's address space, and on the size of the files that it writes, in MiB.
            max_characters: maximum length of a result; a longer result is cut in the middle.

        Raises:
            ConfigError: if this machine has no working sandbox.
        """
        limits = SandboxLimits(time_s=float(seconds), memory_mib=memory_mib)
        run = partial(run_program, limits=limits, max_characters=max_characters)
        super().__init__(run, begin=begin, end=end, help=help, role=role)
        sandbox_of(limits)


@functools.cache
def sandbox_of(limits: SandboxLimits) -> Sandbox:
    """Return this machine's sandbox. It is tried once, and worker processes inherit it."""
    return Sandbox(needed_by='rl.environment.name="python"', limits=limits)


def run_program(program: str, *, limits: SandboxLimits, max_characters: int) -> str:
    """Run a program in the sandbox. Returns its output and errors, and how it ended unless it succeeded."""
    result = sandbox_of(limits).run(program)
    if result.is_timeout:
        ended = f"(ended after {limits.time_s:g} s)"
    else:
        ended = f"(ended with status {result.status})" if result.status else ""
    printed = cut(f"{result.output}{result.errors}".strip(), max_characters)
    return "\n".join(filter(None, (printed, ended))) or "(no output)"
