"""`run_ranks`: a function on real gloo ranks, each its own process."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

from mcore_rl.workers.launcher import free_port

TIMEOUT_S = 300.0


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Return what `function(*args)` returned on each rank; raise the first failure's traceback as an AssertionError.

    `function` must be importable (top level of a module); the world's process group is up when it is called.
    """
    context, port = forkserver(), free_port()
    # As bytes: torch would hand over every tensor of the arguments as a file descriptor, of which a fork takes few.
    work = pickle.dumps((function, args))
    pipes, ranks = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(sender, rank, num_ranks, port, work))
        process.start()
        sender.close()
        pipes.append(receiver)
        ranks.append(process)
    try:
        return _collect(pipes)
    finally:
        for process in ranks:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def forkserver(*first: str) -> ForkServerContext:
    """The server whose processes start in milliseconds, with torch and Megatron in memory, and what else many of them
    would import, for a second each: _dynamo, for an optimizer of torch's, and transformers, for a chat template or as
    an oracle. The modules `first` are imported before all; a server that runs already stays as it is.
    """
    context = multiprocessing.get_context("forkserver")
    modules = ["mcore_rl.programs.rl", "torch._dynamo", "pytest", "transformers.utils.chat_template_utils"]
    context.set_forkserver_preload([*first, *modules])
    return context


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=TIMEOUT_S)
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT_S} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failure, payload = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without an answer") from None
            if failure:
                raise AssertionError(f"rank {rank}:\n{failure}")
            results[rank] = pickle.loads(payload)
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(sender: Connection, rank: int, num_ranks: int, port: int, work: bytes) -> None:
    gc.freeze()  # a collection would write to, and so copy, every page of objects that is shared with the server
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch

    torch.set_num_threads(1)
    from mcore_rl.config.run import PlatformConfig
    from mcore_rl.megatron.platform import start, stop

    try:
        function, args = pickle.loads(work)
        start(PlatformConfig(timeout_s=120.0))
        payload = pickle.dumps(function(*args))
        sender.send((None, payload))
        # A rank that ends takes its connections with it, and rank 0 the store, which others may still wait for.
        with contextlib.suppress(RuntimeError, ValueError):
            torch.distributed.barrier()
        stop()
    except BaseException:  # noqa: BLE001  # whatever it is, the test must show it
        sender.send((traceback.format_exc(), None))
        sys.exit(1)
