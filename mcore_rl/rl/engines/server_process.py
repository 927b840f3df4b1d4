"""Inference servers of a run: their command, their processes, and the fleet, which replaces failed servers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

import mcore_rl
from mcore_rl.checks.model import checked_hf_config
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.rollout import VLLM_RANKS, ServedConfig, VllmConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import FP8_BLOCK, LINEAR
from mcore_rl.rl.engines.server_api import MODEL, ROUTES_FLAG, ServerApi, ServerError, TakenError
from mcore_rl.storage.files import write_atomically
from mcore_rl.workers.launcher import environment_variable, free_port, start_server
from mcore_rl.workers.process_tree import END_TREE

SUPERVISOR = "mcore_rl.workers.process_tree"
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
"""Python module that starts a server, by rl.engine.kind."""
FLAGS = {
    "vllm": ("--model", "--max-model-len", "--tensor-parallel-size", "--max-num-seqs"),
    "sglang": ("--model-path", "--context-length", "--tp-size", "--max-running-requests"),
}
"""Names of the arguments for the model, its longest sequence, GPUs, and requests at a time, by rl.engine.kind."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BACKENDS = {"files": "mcore_files", "nccl": "mcore_broadcast", "ipc": "mcore_slots"}
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


def model_folder(model: ModelConfig, dtype: str, folder: Path, *, in_fp8: bool = False) -> Path:
    """Write the model folder of a server. It has only config.json, because the weights come with the first update."""
    path = folder / "model"
    path.mkdir(parents=True, exist_ok=True)
    config = checked_hf_config(model) | {"torch_dtype": dtype}
    if in_fp8:
        shapes = {**weight_map(model).hf_shapes, "lm_head.weight": (0, 0)}
        matrices = {name.removesuffix(".weight"): name for name, shape in shapes.items() if len(shape) == 2}
        blocks = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK] * 2, "activation_scheme": "dynamic"}
        kept = sorted(module for module, name in matrices.items() if not name.endswith(LINEAR))
        config["quantization_config"] = blocks | {"modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def worker_folder(folder: Path) -> Path:
    """Write a folder of `mcore_rl.vllm_worker` alone: from the package's, vLLM would import the trainer's torch."""
    package = folder / "python" / "mcore_rl"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    source = Path(mcore_rl.__file__).parent / WORKER_MODULE
    (package / WORKER_MODULE).write_bytes(source.read_bytes())
    return package.parent


def server_command(
    config: RlRunConfig, folder: Path, port: int, *, host: str = "127.0.0.1", on_gpu: bool, shared: tuple[str, ...] = ()
) -> ServerCommand:
    """Write the files that a server needs into `folder`. Returns its command, to listen on `host` and `port`, with the
    arguments `shared` of a server that shares GPUs.
    """
    engine = config.served
    assert engine is not None
    precision = config.platform.decided(is_cuda=on_gpu).precision
    dtype, has_base = DTYPES[precision if engine.dtype == "auto" else engine.dtype], engine.lora == "adapter"
    model = engine.base_model if has_base else model_folder(config.model, dtype, folder, in_fp8=engine.in_fp8)
    targets = config.lora.targets_in(config.model) if has_base else ()
    rank = max((config.lora.rank_of(target, config.model) for target in targets), default=0)
    of_model, of_length, of_gpus, of_requests = FLAGS[engine.kind]
    command = [
        *(engine.command or (sys.executable, "-m", MODULES[engine.kind])),
        *(of_model, str(model), "--served-model-name", MODEL, "--load-format", "auto" if has_base else "dummy"),
        *("--host", host, "--port", str(port), "--skip-tokenizer-init", "--dtype", dtype),
        *(of_length, str(served_length(config.longest_sample, config.model, engine))),
        *(of_gpus, str(engine.tensor_parallel)),
        *(() if engine.slots == "auto" else (of_requests, str(engine.slots))),
        *((ROUTES_FLAG,) if config.wants_engine_routes else ()),
    ]
    settings = {"HF_HUB_OFFLINE": "1"}
    defaults: dict[str, str] = {}
    python_path: tuple[str, ...] = ()
    if isinstance(engine, VllmConfig):
        command += [
            *("--enable-scale-out", "--worker-extension-cls", "mcore_rl.vllm_worker.Extension"),
            *("--logprobs-mode", "raw_logprobs" if config.rl.rollout.cuts else "processed_logprobs"),
            *("--weight-transfer-config", json.dumps({"backend": BACKENDS[engine.transport]})),
        ]
        settings |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # first: HTTP endpoints for updates
        python_path = (str(worker_folder(folder)),)
        if has_base:
            # Two adapters, because the former ones are unloaded only after the new ones have been probed.
            allowed = next(most for most in VLLM_RANKS if most >= rank)
            command += ["--enable-lora", "--max-lora-rank", str(allowed), "--max-loras", "2", "--max-cpu-loras", "2"]
            settings["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not on_gpu:
            command.append("--enforce-eager")
            defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            defaults["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        if has_base:
            command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras-per-batch", "2"]
            command += ["--lora-target-modules", *PROJECTIONS]
        command += [] if on_gpu else ["--device", "cpu"]
    return ServerCommand(
        command=(*command, *shared, *engine.args),
        settings=settings | engine.environment,
        defaults=defaults,
        python_path=python_path,
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
        host: str = "127.0.0.1",
    ) -> None:
        """Start the server `command(port)`; `log` is appended to. Empty `devices`: all GPUs visible to this process;
        `port` None: a free port, chosen at each start; `host`: this machine, as those who ask the server name it.
        """
        self.log, self._host = log, host
        self._command, self._devices, self._fixed_port = command, tuple(devices), port
        self.num_starts = 0
        self._start()

    @property
    def url(self) -> str:
        """Address of the server; `restart` may change it."""
        return f"http://{self._host}:{self._port}"

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
            # The servers' GPUs are counted from 0 among those that this process sees.
            own = environment_variable("CUDA_VISIBLE_DEVICES")
            seen = own.split(",") if own else [str(index) for index in range(max(self._devices) + 1)]
            if max(self._devices) >= len(seen):
                raise ConfigError(
                    f"rl.engine.devices={list(self._devices)} with CUDA_VISIBLE_DEVICES={own}: GPUs are counted from 0 "
                    f"among the {len(seen)} that the run sees. Name others, or let the run see more."
                )
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(seen[index] for index in self._devices)
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


def servers_folder(run_dir: str) -> Path:
    """Return the folder of a run's server logs and state."""
    return Path(run_dir) / "servers"


def start_server_of(
    engine: ServedConfig, command: Callable[[int], ServerCommand], folder: Path, index: int
) -> ServerProcess:
    """Start server `index` of rl.engine.count; its log is `server_<index>.log` in `folder`."""
    size = engine.tensor_parallel
    return ServerProcess(
        command, folder / f"server_{index}.log", devices=engine.devices[index * size : (index + 1) * size]
    )


RELEASE_S = 5.0
"""Seconds that a run which ends waits for servers to hear that they are free."""
MAX_STARTS = 5
"""Maximum number of starts of each server in a run."""
LOOK_S = 0.5
STATUS_FILE = "status.json"


def replacement_request(folder: Path, url: str) -> Path:
    """Return the file, in a folder that both machines see, that asks `mcore-rl serve` to restart a server."""
    parts = urlsplit(url)
    return folder / "replace" / f"{parts.hostname}_{parts.port}"


SILENT_S = 60.0
"""Seconds after which a server of rl.engine.servers_dir that has not renewed its entry has left."""


def registration(folder: str, url: str) -> Path:
    """Return the entry of a server in rl.engine.servers_dir, which is there and renewed as long as it may be asked."""
    parts = urlsplit(url)
    return Path(folder) / f"{parts.hostname}_{parts.port}.json"


def register(folder: str, url: str) -> None:
    """Write or renew the entry of a server."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(registration(folder, url), json.dumps({"url": url}) + "\n")


def known_servers(engine: ServedConfig) -> list[str]:
    """Return the addresses of servers that the run does not start: those of `urls`, and those in `servers_dir` now. The
    clocks of the machines have to agree within seconds.
    """
    found = dict.fromkeys(engine.urls)
    for entry in sorted(Path(engine.servers_dir).glob("*.json")) if engine.servers_dir else ():
        with suppress(FileNotFoundError):  # it leaves at this moment
            if time.time() - entry.stat().st_mtime < SILENT_S:
                found[json.loads(entry.read_text(encoding="utf-8"))["url"]] = None
    return list(found)


def write_status(folder: Path, urls: Sequence[str], living: Sequence[str], version: int) -> None:
    """Write the status file for `mcore-rl jobs`: of the servers `urls`, the `living` have the weights of `version`."""
    status = {"version": version, "servers": [{"url": url, "is_serving": url in living} for url in urls]}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / STATUS_FILE, json.dumps(status, indent=1) + "\n")


@dataclass(slots=True)
class ServerFleet:
    """All servers of a run. Only a single thread of rank 0 may use it."""

    config: ServedConfig
    api_at: Callable[[str], ServerApi]
    folder: Path
    """Folder of the servers' logs and state."""
    start: Callable[[int], ServerProcess] | None
    """Function that starts server K of `count`; None: the servers of `urls` are used."""
    lines: list[str] = field(default_factory=list)
    """Events for the log, oldest first; the caller that logs them clears the list."""
    processes: list[ServerProcess] = field(default_factory=list)
    refuse_stop: Callable[[], None] = lambda: None
    """Function that raises StoppedError if the run is to stop; it is called while servers are waited for."""
    _failed: set[str] = field(default_factory=set)
    """Servers that have failed since they were entered."""
    _met: set[str] = field(default_factory=set)
    """Servers that have been entered."""
    _is_open: bool = False

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers that there are now."""
        return [process.url for process in self.processes] or known_servers(self.config)

    def ready(self) -> list[str]:
        """Return the addresses of this run's servers that answer. The first call waits for all that are named or
        started, later calls for `min_servers`. Raises EngineError if too few answer in time, a server ended before it
        ever answered, or cannot be used.
        """
        if not self._is_open and self.start is not None:
            self.processes = [self.start(index) for index in range(self.config.count)]
        total = len(self.processes) or len(self.config.urls)
        wanted = min(self.config.min_servers, total) if self._is_open else total
        if self.config.servers_dir is not None:
            wanted = self.config.min_servers
        deadline = time.monotonic() + self.config.start_timeout_s
        while True:
            self.refuse_stop()
            for process in self.processes:
                if process.is_alive:
                    continue
                if not self._is_open:
                    raise EngineError(f"the server {process.log.stem} {process.ending()}")
                if process.num_starts < MAX_STARTS:
                    self._restart(process, "its process ended")
            urls = self.urls
            ready = [url for url in urls if self.api_at(url).is_healthy()]
            if len(ready) >= wanted:
                break
            has_given_up = bool(self.processes) and not any(process.is_alive for process in self.processes)
            if has_given_up or time.monotonic() > deadline:
                silent = ", ".join(url for url in urls if url not in ready)
                logs = f"; see the logs in {self.folder}" if self.processes else ""
                raise EngineError(
                    f"{len(ready)} of {wanted} servers answer within rl.engine.start_timeout_s="
                    f"{self.config.start_timeout_s:g}; silent: {silent}{logs}. Raise the limit where they start slowly."
                )
            time.sleep(LOOK_S)
        entered = [url for url in ready if self._enter(url)]
        if len(entered) < wanted:
            raise EngineError(f"{len(entered)} of {wanted} servers can be used: {'; '.join(self.lines)}.")
        self._is_open = True
        return entered

    def start_anew(self, lost: Mapping[str, str]) -> None:
        """Restart the servers `lost` (reasons by address); for those of `urls`, ask `mcore-rl serve` to do it."""
        self._failed |= lost.keys()
        for url, reason in lost.items():
            process = next((process for process in self.processes if process.url == url), None)
            if process is None:
                request = replacement_request(self.folder, url)
                request.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(request, f"{reason}\n")
                self.lines.append(f"{url} is left out: {reason}")
            else:
                self._restart(process, reason)

    def write_status(self, living: Sequence[str], version: int) -> None:
        """Write the status file: the servers that have the weights of `version`."""
        write_status(self.folder, self.urls, living, version)

    def close(self) -> None:
        """End the servers that this process started."""
        for process in self.processes:
            process.close()

    def release(self, living: Sequence[str], version: int) -> None:
        """Let other runs take the servers of `urls`, of which the `living` have the weights of `version`."""

        def release(url: str) -> None:
            api = self.api_at(url)
            with suppress(ServerError):
                if api.owner is not None and api.is_ours(api.owner):
                    api.name_weights(f"v{version}" if url in living else "default")

        urls = [] if self.processes else self.urls
        pool = ThreadPoolExecutor(len(urls) or 1)
        wait([pool.submit(release, url) for url in urls], RELEASE_S)
        for url in urls:
            self.api_at(url).cut()
        pool.shutdown()

    def _restart(self, process: ServerProcess, reason: str) -> None:
        old = process.url
        if process.num_starts >= MAX_STARTS:
            process.close()
            self.lines.append(f"{old} is not started again after {MAX_STARTS} starts: {reason}")
            return
        process.restart()
        self.lines.append(
            f"{old} failed and is started again as {process.url}, which gets the weights with the next update: {reason}"
        )

    def _enter(self, url: str) -> bool:
        """Make a server this run's, without an open update, pause or sleep. Returns False if it cannot be used."""
        api = self.api_at(url)
        assert api.owner is not None
        try:
            if not api.is_ours(api.owner, is_first=url not in self._met) or url in self._failed:
                api.refuse_untried()
                api.undo_update()
                api.name_weights(api.owner.version(None))
                self._failed.discard(url)
            self._met.add(url)
        except ServerError as error:
            if not self._is_open:
                advice = "" if isinstance(error, TakenError) else ". Start the server anew"
                raise EngineError(f"{error}{advice}.") from None
            self.lines.append(f"{url} is left out: {error}")
            return False
        return True
