"""Reinforcement learning on one rank beside a fake server on its own GPU, as a program: an account holds what both have
of the GPU's memory, and the server ends where it would be more than there is.

The words before "--" are changes of the account; `events` in the run's folder lists, in order, what server and trainer
did.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mcore_rl.planning import memory
from mcore_rl.programs import rl
from mcore_rl.rl.engines import shared_gpus
from mcore_rl.train import offload
from tests.fake_server import GENERATE, FakeServer, TableAnswers, is_of_probe

TOTAL_BYTES = 24 << 20
MAIN_CALLS = ("/sleep", "/wake_up", "/start_weight_update", "/finish_weight_update", "probe", GENERATE["vllm"])


class Account:
    """The bytes of a GPU that the trainer's residences and the servers have."""

    def __init__(self) -> None:
        self.waiting: list[offload.WaitingMemory] = []
        self.servers: list[FakeServer] = []
        self.events: list[tuple[str, float]] = []

    def note(self, event: str) -> None:
        """Record an event once, however often it comes in a row."""
        if not self.events or self.events[-1][0] != event:
            self.events.append((event, time.monotonic()))

    def trainer_bytes(self) -> int:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for memory in self.waiting
            for tensor in memory._tensors()
        }
        return sum(storages.values())

    def free_bytes(self) -> int:
        return TOTAL_BYTES - self.trainer_bytes() - sum(server.resident_bytes for server in self.servers)


class ServerInThread:
    """A stand-in for `ServerProcess`: its server is in this process, so that it sees the account."""

    def __init__(self, account: Account, servers: shared_gpus.SharedServers, freeing: bool, log: Path) -> None:
        self.log, self.num_starts = log, 0
        self._account, self._servers, self._freeing = account, servers, freeing
        self.restart()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def is_alive(self) -> bool:
        return not self.server.is_dead

    def restart(self) -> None:
        self.num_starts += 1
        account = self._account
        cache_bytes = self._servers._cache_bytes or TOTAL_BYTES - self._servers.planned.generate - (600 << 10)
        sizes = {"weights": self._servers.planned.weights, "kv_cache": cache_bytes}
        server = FakeServer(
            TableAnswers(48),
            sizes=sizes,
            total_bytes=TOTAL_BYTES,
            other_bytes=account.trainer_bytes,
            may_be_misused=True,
        )
        whole = server.answer

        def answer(path: str, query: str, body: dict[str, Any], fault: str | None) -> Any:
            name = "probe" if path == GENERATE["vllm"] and is_of_probe(body) else path
            if name in MAIN_CALLS:
                account.note(f"{name}?{query}" if name == "/wake_up" else name)
            if path == "/sleep" and not self._freeing:
                return {"status": "sleeping"}
            return whole(path, query, body, fault)

        server.answer = answer  # type: ignore[method-assign]
        self.server = server.__enter__()
        account.servers.append(server)

    def ending(self) -> str:
        return f"ended: {self.server.misuses}"

    def close(self) -> None:
        self.server.is_dead = True


def main(argv: Sequence[str]) -> int:
    at = list(argv).index("--")
    changes, words = set(argv[:at]), argv[at + 1 :]
    account = Account()
    made, whole_updates = offload.WaitingMemory.__init__, offload.Residence.for_updates

    def init(self: offload.WaitingMemory, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        account.waiting.append(self)

    def updates(self: offload.Residence) -> Any:
        account.note("train")
        return whole_updates(self)

    def process(servers: shared_gpus.SharedServers, _: int) -> ServerInThread:
        return ServerInThread(account, servers, "no_saver" not in changes, servers.folder / "server_0.log")

    def leave(self: offload.WaitingMemory) -> None:
        if "state_stays" not in changes:
            left(self)

    left = offload.WaitingMemory.leave
    try:
        with (
            mock.patch.object(offload, "store_on", lambda device, store: store),
            mock.patch.object(offload.WaitingMemory, "__init__", init),
            mock.patch.object(offload.WaitingMemory, "leave", leave),
            mock.patch.object(offload.Residence, "for_updates", updates),
            mock.patch.object(shared_gpus.SharedServers, "_process", process),
            mock.patch.object(
                shared_gpus, "_free_bytes", lambda device: None if "blind" in changes else account.free_bytes()
            ),
            mock.patch.object(shared_gpus, "HEADROOM_BYTES", 64 << 10),
            mock.patch.object(shared_gpus, "FREED_S", 0.5),
            mock.patch.object(shared_gpus, "SERVER_REST_BYTES", 0),
            mock.patch.object(memory, "SERVER_REST_BYTES", 0),
            mock.patch.object(memory, "SERVER_WORK_BYTES", 0),
        ):
            return rl.main(words)
    finally:
        (folder,) = (word.removeprefix("run_dir=") for word in words if word.startswith("run_dir="))
        misuses = [misuse for server in account.servers for misuse in server.misuses]
        Path(folder, "events").write_text(json.dumps({"events": account.events, "misuses": misuses}))
