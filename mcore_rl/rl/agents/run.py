"""One run of an agent, in a worker process: a function of the user's, or a program."""

import asyncio
import inspect
import json
import math
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import IO, Any

import psutil

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl.agent import AgentConfig
from mcore_rl.rl.types import Problem
from mcore_rl.rl.workers import MAX_TEXT, CaughtException, FailedScore, cut
from mcore_rl.workers.launcher import foreign_environment

TAIL_BYTES = 2000
"""Bytes of a program's last output that a failure shows."""
SECRETS_OF_A_RUN = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Parts of names of environment variables that a program does not get from the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The task of an agent, and the endpoint that answers it."""

    problem: Problem
    arguments: Mapping[str, Any]
    """`rl.agent.arguments`."""
    base_url: str
    api_key: str
    model: str
    seed: int
    """Seed for the agent's own choices; the policy's are seeded by the endpoint."""


def run_agent(agent: AgentConfig, close_inherited: Callable[[], None], run: Run) -> float | FailedScore | None:
    """Run the agent in this worker process, and end all that it started. Returns its reward, None if it gives none."""
    close_inherited()
    with CaughtException() as guard:
        found: Any
        if agent.function is not None:
            found = load_extension("rl.agent.function", agent.function)(run)
            found = asyncio.run(found) if inspect.iscoroutine(found) else found
        else:
            found = _run_program(agent.command, run)
    _end_started()
    if guard.error is not None:
        return guard.failure(__file__)
    if isinstance(found, FailedScore):
        return found
    value = found.get("reward") if isinstance(found, Mapping) else found
    if value is None:
        return None
    if not isinstance(value, Real):
        return FailedScore("bad_reply", f"the agent returned {cut(repr(found), MAX_TEXT // 2)}; wanted: a number")
    if not math.isfinite(value):
        return FailedScore("not_finite", f"the agent returned the reward {float(value)}")
    return float(value)


def _run_program(command: tuple[str, ...], run: Run) -> Any:
    with tempfile.TemporaryDirectory(prefix="agent-") as folder, tempfile.TemporaryFile() as problem:
        result, empty = Path(folder) / "result.json", Path(folder) / "empty"
        empty.mkdir()
        fields = {**asdict(run.problem), "arguments": dict(run.arguments)}
        problem.write(json.dumps(fields, default=list).encode())
        problem.seek(0)
        inherited = {
            name: value
            for name, value in foreign_environment().items()
            if not any(part in name.upper() for part in SECRETS_OF_A_RUN)
        }
        own = {
            "OPENAI_BASE_URL": run.base_url,
            "OPENAI_API_KEY": run.api_key,
            "ANTHROPIC_BASE_URL": run.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": run.api_key,
            "MCORE_RL_MODEL": run.model,
            "MCORE_RL_SEED": str(run.seed),
            "MCORE_RL_RESULT": str(result),
            "MCORE_RL_FOLDER": str(empty),
        }
        process = subprocess.Popen(
            command, stdin=problem, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=inherited | own
        )
        tail = bytearray()
        assert process.stdout is not None
        reader = threading.Thread(target=_keep_tail, args=(process.stdout, tail), daemon=True)
        reader.start()
        status = process.wait()
        if status:
            reader.join(timeout=1.0)  # a process that it has left may hold the pipe
            shown = bytes(tail).decode(errors="replace")
            return FailedScore("raised", f"{command[0]} ended with status {status}: {shown}")
        if not result.exists():
            return None
        found = json.loads(result.read_text())
        return (
            found if isinstance(found, Mapping) else FailedScore("bad_reply", f"MCORE_RL_RESULT holds {found!r:.200}")
        )


def _keep_tail(stream: IO[bytes], tail: bytearray) -> None:
    while part := stream.read1(1 << 16):  # type: ignore[attr-defined]  # Popen's pipes are buffered readers
        tail += part
        del tail[:-TAIL_BYTES]


def _end_started() -> None:
    """Kill all processes that the agent has left, also those that lost their parent: these are the supervisor's."""
    itself = psutil.Process()
    supervisor = itself.parent()
    for process in [] if supervisor is None else supervisor.children(recursive=True):
        if process.pid != itself.pid:
            with suppress(psutil.NoSuchProcess):
                process.kill()
