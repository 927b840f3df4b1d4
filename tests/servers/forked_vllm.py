"""vLLM's server for CPUs whose processes are copies of one that has imported vLLM, for the Python of MCORE_RL_VLLM.

By itself a server imports vLLM three times, 15 to 25 s of a core each: its API's process spawns the engine's, and that
one the worker's. Here each forks the next, as vLLM's own setting VLLM_WORKER_MULTIPROC_METHOD=fork has it on GPUs.

    python forked_vllm.py --model ...   is one server
    python forked_vllm.py               reads lines of JSON, [log, [argument, ...]], answers each with the process id of
                                        a server that has begun, and ends with its input; servers outlive it

vLLM 0.32 has two gaps on CPUs, which are filled here: its communicator has no collectives for experts of data-parallel
engines, and its model runner of GPUs (V2, the one that records routes) wants a Triton that compiles for CPUs. With
TRITON_INTERPRET=1 Triton's own interpreter runs its kernels.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    # vLLM for CPUs takes a Triton that names this backend; the interpreter compiles nothing.
    backends = import_module("triton.backends").backends
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
# Ids alone are answered: what vLLM writes while it is imported goes elsewhere.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# Before any module binds the name, since vLLM for CPUs sets its setting to "spawn".
import_module("vllm.utils.system_utils").get_mp_context = lambda: multiprocessing.get_context("fork")
# It would import vLLM once more to look at a model's class.
import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda function: function()
entry = import_module("vllm.entrypoints.launchers.api_server.entry")
communicators = import_module("vllm.distributed.device_communicators.cpu_communicator")
torch = import_module("torch")
for name in ("engine.core", "executor.multiproc_executor", "worker.cpu_worker"):
    import_module(f"vllm.v1.{name}")


def gather_rows(communicator: Any, parts: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Collective over the engines: join tensors of different numbers of rows, `sizes` by rank; each of a list alone."""
    if isinstance(parts, list):
        return [gather_rows(communicator, part, dim, sizes) for part in parts]
    sizes = sizes or [len(parts)] * communicator.world_size
    gathered = [parts.new_zeros(max(sizes), *parts.shape[1:]) for _ in sizes]
    padded = gathered[0].clone()
    padded[: len(parts)] = parts
    torch.distributed.all_gather(gathered, padded, group=communicator.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def add_rows(communicator: Any, whole: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Collective over the engines: return this one's rows of the sum of all tensors."""
    sizes = sizes or [len(whole) // communicator.world_size] * communicator.world_size
    added = whole.clone()
    torch.distributed.all_reduce(added, group=communicator.device_group)
    return added.split(sizes)[communicator.rank_in_group].contiguous()


communicators.CpuCommunicator.all_gatherv = gather_rows
communicators.CpuCommunicator.reduce_scatterv = add_rows


def begin(log: str, arguments: list[str]) -> int:
    """Return the process id of a server in a session of its own."""
    if pid := os.fork():
        return pid
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Path(log).open("ab") as output, Path(os.devnull).open() as nothing:
        for file, descriptor in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file.fileno(), descriptor)
    answers.close()
    sys.argv[1:] = arguments
    entry.main()
    sys.exit()


if len(sys.argv) > 1:
    entry.main()
else:
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no server stays as a zombie
    for line in sys.stdin:
        answers.write(f"{begin(*json.loads(line))}\n")
        answers.flush()
