"""Asynchronous rollouts: groups are generated while the policy trains on earlier ones.

The rank of each replica that asks the inference servers (`AskingEngine.asks`) has threads, each of which waits for one
group at a time. Groups start in the order of their prompts, as far as AReaL's bound (arXiv 2505.24298) allows:

    started groups < (max_staleness + trained rollout batches + 1) x prompts_per_step

No token of a rollout batch is then sampled by weights that are more than `max_staleness` rollout batches older than
those that train on it. A rollout batch always has the next prompts, whichever groups end first: prompts, order and
seeds do not depend on time, only the weights that sampled a token do.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from queue import SimpleQueue

from mcore_rl.errors import McoreRlError
from mcore_rl.parallel.agree import from_first_of_model, on_every_rank
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.rollouts.prompts import PromptSource, own_positions
from mcore_rl.rl.types import Group, Prompt

MOST_THREADS = 256
"""Groups that a replica waits for at a time; further ones that may start wait for a thread."""

Request = Callable[[int, Prompt], Group]
"""Function from a prompt and its index to the group of its completions; it is called from several threads."""


class GroupFlow:
    """The groups of this replica that are in progress, or done and not yet taken."""

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
        """Prepare threads; `admit` starts the first groups.

        Args:
            request: asks for one group.
            prompts: the prompts, by index.
            mesh: the mesh, over whose data- and context-parallel ranks the prompts of a rollout batch are spread.
            asks: whether this rank asks for its replica's groups.
            prompts_per_step: prompts of a rollout batch, over all replicas.
            max_staleness: rollouts by which groups may be ahead.
            rollouts: the rollout batches from the next one to the last one of the run.
            cursor: index of the next rollout batch's first prompt.
        """
        self._request, self._prompts, self._mesh, self._asks = request, prompts, mesh, asks
        self._batch, self._max_staleness, self._rollouts, self._cursor = (
            prompts_per_step,
            max_staleness,
            rollouts,
            cursor,
        )
        self._admitted = cursor
        """Index after the last prompt whose group may start."""
        self._started = cursor
        """Index after the last prompt whose group has started, on this replica."""
        self._futures: dict[int, Future[Group]] = {}
        self._waiting: SimpleQueue[tuple[int, Prompt, Future[Group]] | None] = SimpleQueue()
        self._starts = threading.Condition()
        self._is_held = False
        self._taken_s = time.perf_counter()
        share = -(-(max_staleness + 1) * prompts_per_step // mesh.dp_cp.size)
        self._threads = [
            # Daemons: a process that ends after an error does not wait for the answers of servers.
            threading.Thread(target=self._work, name=f"group-{n}", daemon=True)
            for n in range(min(share, MOST_THREADS) if asks else 0)
        ]
        for thread in self._threads:
            thread.start()

    def admit(self, rollout: int) -> None:
        """Let the groups start that the bound allows when `rollout` rollout batches have been trained on."""
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
        """Positions in a rollout batch of the prompts of this replica."""
        return own_positions(self._batch, self._mesh)

    @property
    def started(self) -> int:
        """Index after the last prompt whose group has started on this replica."""
        with self._starts:
            return self._started

    def take(self, cursor: int) -> tuple[list[Group], float]:
        """Collective over the world: wait for this replica's groups of the rollout batch that begins with the prompt
        `cursor`.

        Returns:
            The groups in the order of their prompts, on all ranks of the model, and the seconds since the rollout batch
            before was there.

        Raises:
            McoreRlError: on all ranks, when one of any replica's groups has failed, also of a later rollout batch.
        """
        indices = [cursor + p for p in self.own_positions]
        groups = from_first_of_model(
            on_every_rank(lambda: self._finished(indices) if self._asks else []), self._mesh
        )
        before_s, self._taken_s = self._taken_s, time.perf_counter()
        return groups, self._taken_s - before_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Start no group inside, where the engine's weights are changed; those in progress go on."""
        with self._starts:
            self._is_held = True
        try:
            yield
        finally:
            with self._starts:
                self._is_held = False
                self._starts.notify_all()

    def close(self) -> None:
        """Start no further group; threads end when the engine has answered or given up, which nobody waits for."""
        for future in self._futures.values():
            future.cancel()
        for _ in self._threads:
            self._waiting.put(None)

    def _finished(self, indices: Sequence[int]) -> list[Group]:
        """Wait for these groups; where any group has failed, also a later one, raise its error at once."""
        while True:
            for _, future in sorted(self._futures.items()):
                if future.done() and (error := future.exception()):
                    raise error
            if all(self._futures[index].done() for index in indices):
                return [self._futures.pop(index).result() for index in indices]
            wait([one for one in self._futures.values() if not one.done()], return_when=FIRST_COMPLETED)

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
                future.set_exception(error)  # whoever takes the group raises it, on the main thread
            except BaseException as error:
                future.set_exception(error)
                raise
            else:
                future.set_result(group)
