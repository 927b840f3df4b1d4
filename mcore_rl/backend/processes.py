"""An error on one rank ends all ranks, that rank's traceback first, under whatever launcher.

The ranks share a key-value store (torch's TCPStore on the rendezvous port, so that it is there before the process
group and after it). The first rank to fail claims the failure, prints it, then publishes it; a thread on every rank
looks once a second and ends its process, which may be waiting in a collective.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors.handlers import get_error_handler

from mcore_rl.backend.launcher import (
    Failure,
    error_text,
    note_failure,
    rank_of_launcher,
    world_size_of_launcher,
)
from mcore_rl.errors import INTERRUPTED_STATUS, REFUSED_STATUS, McoreRlError

LOOK_S = 1.0
"""The time between two looks at the store."""
LINGER_S = 3.0
"""The time that a rank waits for the message of the one that failed first, or for the others to read its own."""
CONNECT_S = 300.0
LOST_PEER_TEXTS = ("connection", "broken pipe", "gloo", "nccl", "peer")


def rank_guard() -> AbstractContextManager[None]:
    """Guard everything that a rank does: an error inside ends every rank of the run.

    The failing process has exit status 1, or 2 and no traceback where the user can mend it (McoreRlError).
    To be entered once in the life of a process: the store goes with it.
    """
    world_size = world_size_of_launcher()
    if world_size > 1 and "MASTER_PORT" in os.environ:
        return _Guard(rank_of_launcher(), world_size)
    return _Alone()


class _Alone(AbstractContextManager[None]):
    """The guard of a rank without others."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, McoreRlError):
            sys.stderr.write(error_text(error) + "\n")
            raise SystemExit(2) from None


class _Guard(AbstractContextManager[None]):
    """The guard of one of several ranks. Keys of the store: first, failure, heard, left."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # torchrun's agent keeps a store for its ranks. Elsewhere rank 0 does, in the one server that a process has
        # for an address: the process group will join it.
        self.is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.leaving = threading.Event()
        self.last_message = threading.Lock()

    def __enter__(self) -> None:
        faulthandler.enable(sys.__stderr__ or 2)
        store = TCPStore(
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int(os.environ["MASTER_PORT"]),
            self.world_size,
            is_master=self.is_host,
            timeout=timedelta(seconds=CONNECT_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # The agent's store may outlive a restart of the ranks.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"mcore_rl/rank_guard/{attempt}", store)
        self.watcher = threading.Thread(target=self._watch, name="rank_guard", daemon=True)
        self.watcher.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._leave()
        else:
            self._fail(error)

    def _watch(self) -> None:
        """Until this rank leaves, end it when another has failed, or when the store is gone with its host."""
        while not self.leaving.wait(LOOK_S):
            try:
                failed = self._published()
            except RuntimeError:
                self._end_without_store()
            if failed:
                self._give_way(*failed)

    def _leave(self) -> None:
        """Leave; the store goes with its host, which therefore waits for all others to leave."""
        if self.is_host:
            self.store.add("left", 1)
            while self.store.add("left", 0) < self.world_size:
                time.sleep(LOOK_S / 10)
        self.leaving.set()
        self.watcher.join()
        if not self.is_host:
            self.store.add("left", 1)

    def _fail(self, error: BaseException) -> NoReturn:
        """Report the error to all ranks as the first to fail, or give way to the one that was."""
        headline = f"{type(error).__name__}: {error}".splitlines()[0]
        failure = Failure(self.rank, _status(error), _text(error))
        is_lost_peer = _is_lost_peer(error)
        try:
            if self._first_to_fail(wait=is_lost_peer) != self.rank:
                self._give_way(*self._message_of_the_first(), own_headline=headline)
        except RuntimeError:
            if is_lost_peer:
                self._end_without_store()
        with self.last_message:
            sys.stderr.write(f"Rank {self.rank} failed.\n{failure.text}\n")
            note_failure(failure)
            get_error_handler().record_exception(error)  # so that torchrun's summary names this rank
            with suppress(RuntimeError):
                self.store.set("failure", json.dumps([self.rank, headline]))
                self._wait_until_heard()
            end_process(failure.status)

    def _first_to_fail(self, *, wait: bool) -> int:
        """Return the rank that failed first: this one if no other has claimed it; `wait` a while for such a claim."""
        deadline = time.monotonic() + LINGER_S
        while wait and not self.store.check(["first"]) and time.monotonic() < deadline:
            time.sleep(LOOK_S / 10)
        return int(self.store.compare_set("first", "", str(self.rank)))

    def _message_of_the_first(self) -> tuple[int, str]:
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline:
            if failed := self._published():
                return failed
            time.sleep(LOOK_S / 10)
        return int(self.store.get("first")), "it ended before it could say why"

    def _published(self) -> tuple[int, str] | None:
        if not self.store.check(["failure"]):
            return None
        rank, headline = json.loads(self.store.get("failure"))
        return rank, headline

    def _wait_until_heard(self) -> None:
        """On the host, keep the store until the others have looked."""
        deadline = time.monotonic() + LINGER_S
        while self.is_host and time.monotonic() < deadline:
            if self.store.add("heard", 0) + self.store.add("left", 0) >= self.world_size - 1:
                return
            time.sleep(LOOK_S / 10)

    def _give_way(self, first: int, headline: str, own_headline: str = "") -> NoReturn:
        """End because another rank failed; write nothing where this one failed of the same error."""
        same = headline == own_headline
        self._end("" if same else f"Rank {self.rank} ends because rank {first} failed: {headline}")

    def _end_without_store(self) -> NoReturn:
        self._end(f"Rank {self.rank} ends because rank 0, which keeps the ranks' store, is gone.")

    def _end(self, message: str) -> NoReturn:
        with self.last_message:  # of the watcher and the main thread one writes, and both end
            if message:
                sys.stderr.write(message + "\n")
            with suppress(RuntimeError):
                self.store.add("heard", 1)
            end_process(1)


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_STATUS
    return REFUSED_STATUS if isinstance(error, McoreRlError) else 1


def _text(error: BaseException) -> str:
    """Return a traceback, or a shorter text where a traceback would not help the user."""
    if isinstance(error, McoreRlError):
        return error_text(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether the error reads like the loss of another rank."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(part in text for part in LOST_PEER_TEXTS)


def end_process(status: int) -> NoReturn:
    """End this process and its children at once: a usual exit waits for collectives and children that never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(status)
