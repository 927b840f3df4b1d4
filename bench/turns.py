"""Two programs that take turns on one core: each waits for a line, works, and answers with what that took.

Standard library only: the other side of a comparison runs in an environment of its own.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any


class Turns:
    """The side that works. What else it prints goes to standard error; `cpu_s` is read at both ends of a turn."""

    def __init__(self, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._cpu_s = cpu_s
        self._left = 0
        self._facts: Counter[str] = Counter()
        self._start: tuple[float, float] | None = None

    def next_step(self) -> bool:
        """Return whether to do one more step, waited for at the beginning of each; the turn before ends here."""
        if self._left == 0:
            self._answer()
            line = sys.stdin.readline()
            if not line:
                return False
            self._left = int(line)
            self._facts.clear()
            self._start = self._cpu_s(), time.perf_counter()
        self._left -= 1
        return True

    def add(self, name: str, number: float) -> None:
        """Sum up a number of the turn."""
        self._facts[name] += number  # type: ignore[assignment]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose CPU seconds are summed up as `name`."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, time.process_time() - start)

        return call

    def _answer(self) -> None:
        """`{}` when ready, and after each turn its figures with `step_s` and `wall_s` of all of its steps."""
        if self._start is not None:
            cpu_s, wall_s = self._start
            self.add("step_s", self._cpu_s() - cpu_s)
            self.add("wall_s", time.perf_counter() - wall_s)
        self._answers.write(json.dumps(self._facts) + "\n")


class Worker:
    """A process with a `Turns`, seen from the outside; ended when the `with` ends."""

    def __init__(self, command: Sequence[str], folder: Path, root: Path, log: Path) -> None:
        """`root` holds the modules of `command`, which runs in `folder`."""
        self._command, self._folder, self._log = list(command), folder, log
        self._environment = os.environ | {"PYTHONPATH": str(root)}

    def __enter__(self) -> "Worker":
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def turn(self, steps: int) -> dict[str, float]:
        """Return the figures of that many steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text().splitlines()[-20:]
            raise RuntimeError("\n".join([f"{' '.join(self._command)} ended; {self._log} says:", *lines]))
        figures: dict[str, float] = json.loads(line)
        return figures
