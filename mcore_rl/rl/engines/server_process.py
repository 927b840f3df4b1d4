"""Inference servers as processes of this machine: their command, their start, and the end of their process tree."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

import mcore_rl
from mcore_rl.checks.model import checked_hf_config
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.engine import VLLM_RANKS, ServedConfig, VllmConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.engines.served_routes import FLAG
from mcore_rl.rl.engines.vllm_api import MODEL
from mcore_rl.workers.launcher import environment_variable, free_port, start_server
from mcore_rl.workers.process_tree import END_TREE

SUPERVISOR = "mcore_rl.workers.supervisor"
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
"""Python module that starts a server, by rl.engine.kind."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BACKENDS = {"files": "mcore_files", "nccl": "mcore_broadcast"}
"""Name under which vllm_worker.py registers each transport."""
WORKER_MODULE = "vllm_worker.py"
END_S = 15.0
"""Seconds after which a server's processes are killed."""
TAIL_LINES = 15
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the Hugging Face modules that may have adapters."""
FEWEST_TOKENS = 64
"""Minimum context length of a server, in tokens, so that the probe's sequences fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """Command and environment of a server."""

    command: tuple[str, ...]
    settings: Mapping[str, str]
    """Environment variables."""
    defaults: Mapping[str, str]
    """Environment variables that are set unless the user has set them."""
    python_path: tuple[str, ...] = ()
    """Folders placed first on the server's Python path."""


def served_length(longest_sample: int, model: ModelConfig, engine: ServedConfig) -> int:
    """Return the context length of the servers: the maximum number of tokens of prompt and completion together."""
    if engine.max_model_len != "auto":
        return engine.max_model_len
    return min(max(longest_sample, FEWEST_TOKENS), model.max_position)


def served_dtype(precision: str, engine: ServedConfig) -> str:
    """Return the servers' name of the data type of their weights."""
    dtype = engine.dtype
    return DTYPES[precision if dtype == "auto" else dtype]


def model_folder(model: ModelConfig, dtype: str, folder: Path) -> Path:
    """Write the model folder of a server. It has only config.json, because the weights come with the first update."""
    path = folder / "model"
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        checked_hf_config(model) | {"torch_dtype": dtype},
        indent=1,
    )
    (path / "config.json").write_text(text, encoding="utf-8")
    return path


def worker_folder(folder: Path) -> Path:
    """Write the folder from which vLLM's workers import `mcore_rl.vllm_worker`.

    It contains only this file: with the folder of the installed package on its path, vLLM would also import the
    trainer's torch.
    """
    package = folder / "python" / "mcore_rl"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    source = Path(mcore_rl.__file__).parent / WORKER_MODULE
    (package / WORKER_MODULE).write_bytes(source.read_bytes())
    return package.parent


def server_command(
    config: RlRunConfig, folder: Path, port: int, *, host: str = "127.0.0.1", on_gpu: bool
) -> ServerCommand:
    """Write the files that a server needs into `folder`, and return its command.

    Args:
        config: The run's config, with servers.
        folder: Folder of the run's servers.
        port: Port on which the server listens.
        host: Address on which the server listens.
        on_gpu: Whether the server computes on a GPU.
    """
    engine = config.served
    assert engine is not None
    dtype = served_dtype(config.platform.precision, engine)
    has_base = engine.lora == "adapter"
    served = _Served(
        model=str(engine.base_model if has_base else model_folder(config.model, dtype, folder)),
        weights="auto" if has_base else "dummy",
        rank=highest_rank(config.lora, config.model) if has_base else None,
        dtype=dtype,
        length=str(served_length(config.longest_sample, config.model, engine)),
        address=("--host", host, "--port", str(port)),
        routes=(FLAG,) if config.wants_engine_routes else (),
    )
    start = engine.command or (sys.executable, "-m", MODULES[engine.kind])
    if not isinstance(engine, VllmConfig):
        return ServerCommand(
            command=(*start, *_sglang_arguments(engine, served, on_gpu=on_gpu), *engine.args),
            settings={"HF_HUB_OFFLINE": "1"},
            defaults={},
        )
    is_cut = bool(config.rl.rollout.cuts)
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return ServerCommand(
        command=(*start, *_vllm_arguments(engine, served, is_cut=is_cut, on_gpu=on_gpu), *engine.args),
        settings={
            "VLLM_SERVER_DEV_MODE": "1",  # enables the HTTP endpoints for weight updates
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if has_base else {}),
        },
        defaults={} if on_gpu else defaults,
        python_path=(str(worker_folder(folder)),),
    )


class _Served(NamedTuple):
    """Arguments of a server that follow from config sections other than the engine's."""

    model: str
    weights: str
    """Source of its weights; `dummy`: a later weight update; `auto`: the folder `model`."""
    rank: int | None
    """Highest rank of the adapters that it loads; None if it loads no adapters."""
    dtype: str
    length: str
    address: tuple[str, ...]
    routes: tuple[str, ...]


def _vllm_arguments(engine: VllmConfig, served: _Served, *, is_cut: bool, on_gpu: bool) -> list[str]:
    return [
        *("--model", served.model, "--served-model-name", MODEL, "--load-format", served.weights),
        *(*served.address, "--skip-tokenizer-init", "--enable-scale-out"),
        *("--dtype", served.dtype, "--max-model-len", served.length),
        *("--tensor-parallel-size", str(engine.tensor_parallel)),
        *(() if engine.slots == "auto" else ("--max-num-seqs", str(engine.slots))),
        *("--logprobs-mode", "raw_logprobs" if is_cut else "processed_logprobs"),
        *("--worker-extension-cls", "mcore_rl.vllm_worker.Extension"),
        *("--weight-transfer-config", json.dumps({"backend": BACKENDS[engine.transport]})),
        *served.routes,
        *(() if served.rank is None else _vllm_adapters(served.rank)),
        *([] if on_gpu else ["--enforce-eager"]),
    ]


def _sglang_arguments(engine: ServedConfig, served: _Served, *, on_gpu: bool) -> list[str]:
    return [
        *("--model-path", served.model, "--served-model-name", MODEL, "--load-format", served.weights),
        *(*served.address, "--skip-tokenizer-init"),
        *("--dtype", served.dtype, "--context-length", served.length),
        *("--tp-size", str(engine.tensor_parallel)),
        *(() if engine.slots == "auto" else ("--max-running-requests", str(engine.slots))),
        *served.routes,
        *(() if served.rank is None else _sglang_adapters(served.rank)),
        *([] if on_gpu else ["--device", "cpu"]),
    ]


def highest_rank(lora: LoraConfig, model: ModelConfig) -> int:
    """Return the highest rank of a policy's adapters."""
    return max(lora.rank_of(target, model) for target in lora.targets_in(model))


def _vllm_adapters(rank: int) -> tuple[str, ...]:
    # Two, because the former adapters are unloaded only after the new adapters have been probed.
    allowed = next(most for most in VLLM_RANKS if most >= rank)
    return ("--enable-lora", "--max-lora-rank", str(allowed), "--max-loras", "2", "--max-cpu-loras", "2")


def _sglang_adapters(rank: int) -> tuple[str, ...]:
    return (
        *("--enable-lora", "--max-lora-rank", str(rank), "--max-loras-per-batch", "2"),
        *("--lora-target-modules", *PROJECTIONS),
    )


class ServerProcess:
    """A server process that can be restarted. Neither it nor its children outlive `close` or this process."""

    def __init__(
        self,
        command: Callable[[int], ServerCommand],
        log: Path,
        *,
        devices: Sequence[int] = (),
        port: int | None = None,
    ) -> None:
        """Start the server.

        Args:
            command: Function that returns the command of a server that listens on the given port.
            log: File to which the server's output is appended.
            devices: GPUs of the server; empty: all GPUs visible to this process.
            port: Port of the server; None: a free port, chosen at each start.
        """
        self.log = log
        self._command, self._devices, self._fixed_port = command, tuple(devices), port
        self.num_starts = 0
        self._start()

    @property
    def url(self) -> str:
        """Address of the server; `restart` may change it."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    @property
    def age_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_s

    def ending(self) -> str:
        """Describe how the server ended, with the last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-TAIL_LINES:]
        return f"ended with status {self._process.poll()}; the end of {self.log}:\n" + "\n".join(lines)

    def restart(self) -> None:
        """End the server with all its processes, and start it again, on a new port unless the port is fixed."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the server with all its processes, even a broken server that no longer answers."""
        if self.is_alive:
            self._process.send_signal(END_TREE)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                with suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(self._process.pid).children(recursive=True):
                        child.kill()
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        self._port = self._fixed_port or free_port()
        found = self._command(self._port)
        settings = dict(found.settings)
        if self._devices:
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._devices))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        supervisor = (sys.executable, "-m", SUPERVISOR, str(os.getpid()))
        # The supervisor imports this package with this process's path; the server's own folders come before it.
        inherited = environment_variable("PYTHONPATH")
        path = os.pathsep.join(filter(None, (*found.python_path, inherited)))
        self._process = start_server(
            (*supervisor, "env", f"PYTHONPATH={path}", *found.command), settings, found.defaults, self.log
        )
        self._started_s = time.monotonic()
        self.num_starts += 1
