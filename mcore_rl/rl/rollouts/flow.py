"""Asynchronous rollouts: groups are generated while the policy trains on earlier groups, by threads of the rank of each
replica that sends requests. Groups start in the order of their prompts, as far as AReaL's bound (arXiv 2505.24298)
allows:

    started groups < (max_staleness + trained rollout batches + 1) x prompts_per_step

Every token is then sampled by weights at most `max_staleness` rollout batches older than the weights that train on it.
A rollout batch always consists of the next prompts, in order, no matter which groups finish first.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from queue import SimpleQueue

from mcore_rl.errors import McoreRlError
from mcore_rl.megatron.agree import from_first_of_model, on_every_rank
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.rollouts.prompts import PromptSource, own_positions
from mcore_rl.rl.types import Group, Prompt

MOST_THREADS = 256
"""Maximum number of groups that a replica waits for at a time; further groups wait for a free thread."""

Request = Callable[[int, Prompt], Group]
"""Function from a prompt's index and the prompt to its group of completions; it is called from several threads."""


class GroupFlow:
    """This replica's groups that are in progress, or finished but not yet taken."""

    def __init__(
        self,
        request: Request,
        prompts: PromptSource,
        mesh: Mesh,
        *,
        asks: bool,
        prompts_per_step: int,
        max_staleness: int,
        rollouts: range,
        cursor: int,
    ) -> None:
        """Start the threads; `admit` starts the first groups. `asks`: whether this rank requests its replica's groups;
        `prompts_per_step` counts all replicas; `rollouts` are those left; `cursor` is the index of the next prompt.
        """
        self._request, self._prompts, self._mesh, self._asks = request, prompts, mesh, asks
        self._batch, self._max_staleness = prompts_per_step, max_staleness
        self._rollouts, self._cursor = rollouts, cursor
        self._admitted = cursor
        """Index after the last prompt that may start."""
        self._started = cursor
        """Index after the last prompt that this replica has started."""
        self._futures: dict[int, Future[Group]] = {}
        self._waiting: SimpleQueue[tuple[int, Prompt, Future[Group]] | None] = SimpleQueue()
        self._starts = threading.Condition()
        self._is_held = False
        self._taken_s = time.perf_counter()
        share = -(-(max_staleness + 1) * prompts_per_step // mesh.dp_cp.size)
        self._threads = [
            # Daemons: a process that ends after an error does not wait for the servers to answer.
            threading.Thread(target=self._work, name=f"group-{n}", daemon=True)
            for n in range(min(share, MOST_THREADS) if asks else 0)
        ]
        for thread in self._threads:
            thread.start()

    def admit(self, rollout: int) -> None:
        """Let the groups start that the bound allows once the policy has trained on `rollout` rollout batches."""
        allowed = min(rollout + self._max_staleness + 1, self._rollouts.stop) - self._rollouts.start
        end = self._cursor + allowed * self._batch
        if end <= self._admitted:
            return
        if self._asks:
            indices = range(self._admitted, end)
            for index, prompt in zip(indices, self._prompts.take(self._admitted, len(indices)), strict=True):
                if (index - self._cursor) % self._batch in self.own_positions:
                    future = self._futures[index] = Future()
                    self._waiting.put((index, prompt, future))
        self._admitted = end

    @property
    def own_positions(self) -> range:
        """Positions of this replica's prompts in a rollout batch."""
        return own_positions(self._batch, self._mesh)

    @property
    def started(self) -> int:
        """Index after the last prompt that this replica has started."""
        with self._starts:
            return self._started

    def take(self, cursor: int, of_stage: Callable[[Group, int], Group]) -> tuple[list[Group], float]:
        """Collective over the world: wait for this replica's groups of the rollout batch that begins with prompt
        `cursor`. Returns them, reduced by `of_stage`, on all ranks of the replica, and the seconds since the previous
        batch was complete. Raises McoreRlError on all ranks if any group of any replica has failed, including those of
        later batches.
        """
        indices = [cursor + p for p in self.own_positions]
        groups = from_first_of_model(
            on_every_rank(lambda: self._finished(indices) if self._asks else []),
            self._mesh,
            lambda groups, stage: [of_stage(group, stage) for group in groups],
        )
        before_s, self._taken_s = self._taken_s, time.perf_counter()
        return groups, self._taken_s - before_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Start no new groups within the context, while the engine's weights change; groups in progress continue."""
        with self._starts:
            self._is_held = True
        try:
            yield
        finally:
            with self._starts:
                self._is_held = False
                self._starts.notify_all()

    def close(self) -> None:
        """Start no further groups. Does not wait for the threads, which end when the engine has answered or failed."""
        for future in self._futures.values():
            future.cancel()
        for _ in self._threads:
            self._waiting.put(None)

    def _finished(self, indices: Sequence[int]) -> list[Group]:
        """Wait for these groups; if any group has failed, even a later group, raise its error at once."""
        while True:
            for _, future in sorted(self._futures.items()):
                if future.done() and (error := future.exception()):
                    raise error
            if all(self._futures[index].done() for index in indices):
                return [self._futures.pop(index).result() for index in indices]
            pending = [future for future in self._futures.values() if not future.done()]
            wait(pending, return_when=FIRST_COMPLETED)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            index, prompt, future = job
            with self._starts:
                self._starts.wait_for(lambda: not self._is_held)
                if not future.set_running_or_notify_cancel():
                    continue
                self._started = max(self._started, index + 1)
            try:
                group = self._request(index, prompt)
            except McoreRlError as error:
                future.set_exception(error)  # `take` raises it on the main thread
            except BaseException as error:
                future.set_exception(error)
                raise
            else:
                future.set_result(group)
