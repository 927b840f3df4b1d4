"""The servers of a run, managed by rank 0: it starts or finds them, waits for them, and replaces failed servers."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mcore_rl.config.rl.engine import ServedConfig
from mcore_rl.errors import EngineError
from mcore_rl.rl.engines.server_api import ServerApi, ServerError
from mcore_rl.rl.engines.server_process import ServerProcess
from mcore_rl.storage.files import write_atomically

MAX_STARTS = 5
"""Maximum number of starts of each server in a run."""
LOOK_S = 0.5
STATUS_FILE = "status.json"


def replacement_request(folder: Path, url: str) -> Path:
    """Return the file with which a run asks `mcore-rl serve`, on another machine, to restart a server.

    Args:
        folder: The folder of the run's servers, accessible from both machines.
        url: The server's address.
    """
    parts = urlsplit(url)
    return folder / "replace" / f"{parts.hostname}_{parts.port}"


@dataclass(slots=True)
class ServerFleet:
    """All servers of a run. Only a single thread of rank 0 may use it."""

    config: ServedConfig
    api_at: Callable[[str], ServerApi]
    folder: Path
    """Folder of the servers' logs and state."""
    start: Callable[[int], ServerProcess] | None
    """Function that starts server K of `count`; None: the servers of `urls` are used."""
    refuse: Callable[[ServerApi], None] = lambda api: None
    """Function that raises EngineError for a server that cannot be used, such as an untested version."""
    lines: list[str] = field(default_factory=list)
    """Events for the log, oldest first; the caller that logs them clears the list."""
    processes: list[ServerProcess] = field(default_factory=list)
    _accepted: set[str] = field(default_factory=set)
    """Servers that have been checked once."""
    _is_open: bool = False

    def ready(self) -> list[str]:
        """Return the addresses of the servers that answer. The first call waits for all servers, later calls for
        `min_servers`.

        Raises:
            EngineError: if too few servers answer in time, a server ended before it ever answered, or a server cannot
                be used.
        """
        if not self._is_open and self.start is not None:
            self.processes = [self.start(index) for index in range(self.config.count)]
        total = len(self.processes) or len(self.config.urls)
        wanted = min(self.config.min_servers, total) if self._is_open else total
        deadline = time.monotonic() + self.config.start_timeout_s
        while True:
            self._look_at_processes()
            urls = [process.url for process in self.processes] or list(self.config.urls)
            ready = [url for url in urls if self.api_at(url).is_healthy()]
            if len(ready) >= wanted:
                break
            if time.monotonic() > deadline:
                raise EngineError(self._too_few(ready, wanted, [url for url in urls if url not in ready]))
            time.sleep(LOOK_S)
        for url in ready:
            if url not in self._accepted:
                self.refuse(self.api_at(url))
                self._accept(url)
        self._is_open = True
        return ready

    def start_anew(self, lost: dict[str, str]) -> None:
        """Restart failed servers. For servers of `urls`, leave a request for `mcore-rl serve`, in case it started them.

        Args:
            lost: Reason of the failure, by address.
        """
        for url, reason in lost.items():
            process = next((process for process in self.processes if process.url == url), None)
            if process is None:
                request = replacement_request(self.folder, url)
                request.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(request, f"{reason}\n")
                self.lines.append(f"{url} is left out: {reason}")
                continue
            self._restart(process, reason)

    def write_status(self, living: Sequence[str], version: int) -> None:
        """Write the status file for `mcore-rl jobs`: the servers that have the weights of `version`."""
        urls = [process.url for process in self.processes] or list(self.config.urls)
        status = {
            "version": version,
            "servers": [{"url": url, "is_serving": url in living} for url in urls],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / STATUS_FILE, json.dumps(status, indent=1) + "\n")

    def close(self) -> None:
        """End the servers that this process started."""
        for process in self.processes:
            process.close()

    def _look_at_processes(self) -> None:
        for process in self.processes:
            if process.is_alive:
                continue
            if not self._is_open:
                raise EngineError(f"the server {process.log.stem} {process.ending()}")
            if process.num_starts < MAX_STARTS:
                self._restart(process, "its process ended")

    def _restart(self, process: ServerProcess, reason: str) -> None:
        old = process.url
        if process.num_starts >= MAX_STARTS:
            process.close()
            self.lines.append(f"{old} is not started again after {MAX_STARTS} starts: {reason}")
            return
        process.restart()
        self.lines.append(
            f"{old} failed and is started again as {process.url}, which gets the weights with the next update: "
            f"{reason}"
        )

    def _accept(self, url: str) -> None:
        """Resume a server, which an earlier run may have left paused."""
        try:
            self.api_at(url).resume()
        except ServerError as error:
            raise EngineError(f"{error}. Start the server anew.") from None
        self._accepted.add(url)

    def _too_few(self, ready: Sequence[str], wanted: int, silent: Sequence[str]) -> str:
        logs = f"; see the logs in {self.folder}" if self.processes else ""
        return (
            f"{len(ready)} of {wanted} servers answer within rl.engine.start_timeout_s="
            f"{self.config.start_timeout_s:g}; silent: {', '.join(silent)}{logs}. Raise the limit where they start "
            "slowly."
        )
