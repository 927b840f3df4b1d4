"""Rank guard: the first error ends every rank and is printed first, under any launcher.

The ranks share a key-value store (torch's TCPStore on the rendezvous port). The first rank to fail claims the failure,
prints it, then publishes it; a thread on every rank looks once a second, ends its process even in a collective, and
counts, so that a rank that has lost its peer names the peer, not itself.
"""

import faulthandler
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

import psutil
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors.handlers import get_error_handler

from mcore_rl.errors import HUNG_STATUS, INTERRUPTED_STATUS, REFUSED_STATUS, McoreRlError, after_echo, error_text
from mcore_rl.storage.files import machine_error, open_standard_streams
from mcore_rl.workers.failures import Failure, Order, collected_in, first_cause, note_failure, rank_failure
from mcore_rl.workers.launcher import rank_of_launcher, world_size_of_launcher

LOOK_S = 1.0
"""Seconds between two looks at the store."""
LINGER_S = 3.0
"""Seconds that a rank waits for the message of the rank that failed first, or for the other ranks to read its own."""
CONNECT_S = 300.0
SILENT_S = 15.0
"""Seconds without a sign of a rank after which it is recorded as stopped or cut off."""
MOST_NAMED = 4
"""Maximum number of lost ranks that a message names."""
MONITOR_LOOKS = 3
"""Number of looks at the store between two counts of all ranks' signs, by the first and the last rank."""
LOST_PEER_TEXTS = ("connection", "broken pipe", "gloo", "nccl", "peer")
T = TypeVar("T")


def rank_guard() -> AbstractContextManager[None]:
    """Guard everything that a rank does: an error inside ends every rank of the run.

    The exit status is 1, or 2 without a traceback for a McoreRlError. To be entered once in the life of a process.
    """
    open_standard_streams()
    world_size = world_size_of_launcher()
    if world_size > 1 and "MASTER_PORT" in os.environ:
        return _Guard(rank_of_launcher(), world_size)
    return _Alone()


class _Alone(AbstractContextManager[None]):
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        error = _explained(error)
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.write(f"{after_echo()}interrupted\n")
            raise SystemExit(_status(error)) from None
        note_failure(rank_failure(rank_of_launcher(), _status(error), _cause(error), _text(error)))
        if isinstance(error, McoreRlError):
            sys.stderr.write(error_text(error) + "\n")
            raise SystemExit(2) from None


class _Guard(AbstractContextManager[None]):
    # Keys of the store: first, failure; host, sign, gone, heard and left of each rank.
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # torchrun's agent keeps a store for its ranks. Otherwise rank 0 does, in the only server that a process has for
        # an address: the process group will join it.
        self.is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # Two ranks, on two nodes if there are several: the lost node may be the node of either.
        self.is_monitor = rank in (0, world_size - 1)
        self.leaving = threading.Event()
        self.last_message = threading.Lock()
        self.looked_s = time.monotonic()
        self.num_signs = 0
        self.silent: dict[int, Path | None] = {}
        """Rank that gives no sign -> the record of it."""

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
        self.store.set(f"host/{self.rank}", platform.node())
        self._give_sign()
        self.watcher = threading.Thread(target=self._watch, name="rank_guard", daemon=True)
        self.watcher.start()
        if self.is_monitor:
            threading.Thread(target=self._watch_store, name="rank_guard_store", daemon=True).start()

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._leave()
        else:
            self._fail(_explained(error))

    def _watch(self) -> None:
        """Until this rank leaves, end it when another rank has failed, or when the store is gone with its host."""
        looks = 0
        signs: dict[int, tuple[int, float]] = {}
        while not self.leaving.wait(LOOK_S):
            try:
                self._give_sign()
                failed = self._published()
                looks += 1
                if self.is_monitor and looks % MONITOR_LOOKS == 0:
                    self._note_silent_ranks(signs)
                    # NCCL would wait for the rank, whose death the process above it has recorded.
                    folder = collected_in()
                    cause = first_cause(folder) if folder else None
                    if cause and cause.order == Order.CAUSE and self._published() is None:
                        self.store.set("failure", json.dumps([cause.rank, cause.headline]))
            except RuntimeError:
                self._end_without_store()
            self.looked_s = time.monotonic()
            if failed:
                self._give_way(*failed)

    def _note_silent_ranks(self, signs: dict[int, tuple[int, float]]) -> None:
        # A rank that gives a sign again is not a cause. Each rank's count comes with the time of its last change.
        now_s = time.monotonic()
        for rank in range(self.world_size):
            count = self._signs_of(rank)
            before, since_s = signs.get(rank, (0, now_s))
            signs[rank] = (count, since_s if count == before else now_s)
            if count and now_s - signs[rank][1] > SILENT_S and self._read(f"gone/{rank}") is None:
                self._note_silence(rank, self._host_of(rank))
            elif count != before and (record := self.silent.pop(rank, None)):
                record.unlink(missing_ok=True)

    def _give_sign(self) -> None:
        self.num_signs += 1
        self.store.set(f"sign/{self.rank}", str(self.num_signs))

    def _signs_of(self, rank: int) -> int:
        return int(self._read(f"sign/{rank}") or 0)

    def _host_of(self, rank: int) -> str:
        return self._read(f"host/{rank}") or "an unknown host"

    def _note_silence(self, rank: int, host: str) -> None:
        if rank in self.silent:
            return
        cause = f"gives no sign of life since {SILENT_S:g} s: its process is stopped, or its node does not answer"
        self.silent[rank] = note_failure(rank_failure(rank, HUNG_STATUS, cause, order=Order.CONSEQUENCE, host=host))

    def _watch_store(self) -> None:
        # `_watch` waits for the host's answer, and collectives for its rank.
        while not self.leaving.wait(LOOK_S):
            if time.monotonic() - self.looked_s > SILENT_S:
                self._note_silence(0, os.environ.get("MASTER_ADDR", "127.0.0.1"))

    def _leave(self) -> None:
        # The store ends with its host, which therefore leaves last.
        self.store.set(f"gone/{self.rank}", "")  # before it waits: from now on its silence is no failure
        if self.is_host:
            waiting = set(range(self.world_size)) - {self.rank}
            while waiting := {rank for rank in waiting if self._read(f"left/{rank}") is None}:
                time.sleep(LOOK_S / 10)
        self.leaving.set()
        self.watcher.join()
        if not self.is_host:
            self.store.set(f"left/{self.rank}", "")

    def _fail(self, error: BaseException) -> NoReturn:
        cause = _cause(error)
        # gloo raises RuntimeErrors and NCCL DistErrors; an OSError is a file's or another server's.
        text = str(error).lower()
        is_of_torch = type(error) is RuntimeError or isinstance(error, DistError)
        is_lost_peer = is_of_torch and any(part in text for part in LOST_PEER_TEXTS)
        origin = _origin(error)
        failure = rank_failure(self.rank, _status(error), cause, _text(error))
        try:
            if origin is not None:
                failure = rank_failure(origin, failure.status, cause, failure.text, host=self._host_of(origin))
            if is_lost_peer:
                failure = self._lost_peer(failure, cause)
            # The rank that met what all raise reports it: its console has the text.
            if is_lost_peer or origin not in (None, self.rank):
                _soon(lambda: self._read("first"))
            # The store has this rank under "first" from now on, unless another has claimed it before.
            if (first := int(self.store.compare_set("first", "", str(self.rank)))) != self.rank:
                failed = _soon(self._published) or (first, "it ended before it could say why")
                self._give_way(*failed, own_headline=cause)
        except RuntimeError:
            if is_lost_peer:
                self._end_without_store()
        with self.last_message:
            title = f"Rank {failure.rank} failed." if isinstance(error, McoreRlError) else failure.headline
            # First, because it makes room on a full disk, on which stderr may be a file too.
            note_failure(failure)
            with suppress(OSError):
                sys.stderr.write(f"{title}\n{failure.text}\n")
            get_error_handler().record_exception(error)  # so that torchrun's summary names this rank
            with suppress(RuntimeError):
                self.store.set("failure", json.dumps([failure.rank, cause]))
                if self.is_host:
                    others = set(range(self.world_size)) - {self.rank}
                    _soon(
                        lambda: all(self.store.check([f"heard/{r}"]) or self.store.check([f"left/{r}"]) for r in others)
                    )
            end_process(failure.status)

    def _lost_peer(self, failure: Failure, cause: str) -> Failure:
        before = [self._signs_of(rank) for rank in range(self.world_size)]
        time.sleep(2.5 * LOOK_S)  # in which a living rank gives two signs
        gone = [
            rank for rank, count in enumerate(before) if count and rank != self.rank and self._signs_of(rank) == count
        ]
        if not gone:
            return replace(failure, order=int(Order.LOST_PEER))
        hosts = [self._host_of(rank) for rank in gone[:MOST_NAMED]]
        others = "".join(f", rank {rank} on {host}" for rank, host in list(zip(gone, hosts, strict=False))[1:])
        others += f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
        text = f"is gone without a word{others}: killed, or its node is lost (rank {self.rank} lost it: {cause})"
        return rank_failure(gone[0], failure.status, text, failure.text, Order.LOST_PEER, hosts[0])

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _published(self) -> tuple[int, str] | None:
        message = self._read("failure")
        if message is None:
            return None
        rank, headline = json.loads(message)
        return rank, headline

    def _give_way(self, first: int, headline: str, own_headline: str = "") -> NoReturn:
        same = headline == own_headline
        self._end("" if same else f"Rank {self.rank} ends because rank {first} failed: {headline}")

    def _end_without_store(self) -> NoReturn:
        if self.is_monitor:
            cause = "is gone without a word: killed, or its node is lost (it kept the ranks' store)"
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            note_failure(rank_failure(0, 1, cause, order=Order.LOST_PEER, host=host))
        self._end(f"Rank {self.rank} ends because rank 0, which keeps the ranks' store, is gone.")

    def _end(self, message: str) -> NoReturn:
        with self.last_message:  # of the watcher and the main thread one writes, and both end
            if message:
                with suppress(OSError):  # a full disk
                    sys.stderr.write(message + "\n")
            with suppress(RuntimeError):
                self.store.set(f"heard/{self.rank}", "")
            end_process(1)


def _soon(ask: Callable[[], T]) -> T:
    """Return the first answer that is true, or after LINGER_S the last."""
    deadline = time.monotonic() + LINGER_S
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(LOOK_S / 10)
    return answer


def _explained(error: BaseException) -> BaseException:
    return (machine_error(error) if isinstance(error, OSError) else None) or error


def _origin(error: BaseException | None) -> int | None:
    """Return the rank with an error that all ranks raise together, or that led to this error; None for this rank."""
    while isinstance(error, McoreRlError):
        if error.rank is not None:
            return error.rank
        error = error.__cause__
    return None


def _cause(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_STATUS
    return REFUSED_STATUS if isinstance(error, McoreRlError) else 1


def _text(error: BaseException) -> str:
    if isinstance(error, McoreRlError):
        return error_text(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return f"{type(error).__name__}: {error}"
    # The last line first: whatever cuts the text leaves the error itself.
    return f"{_cause(error)}\n{''.join(traceback.format_exception(error)).rstrip()}"


def end_process(status: int) -> NoReturn:
    """End this process and its children at once: a usual exit waits for collectives and children that never end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk
            stream.flush()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(status)
