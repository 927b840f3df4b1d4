"""`mcore-rl serve`: run the inference servers of an RL config on this machine, and restart servers that exit."""

import argparse
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rl.engines.server_process import (
    ServerProcess,
    replacement_request,
    server_command,
    servers_folder,
)
from mcore_rl.storage.run_config import load_run_config

GPU_DEVICE = Path("/dev/nvidiactl")
EVERYWHERE = "0.0.0.0"
LOOK_S = 1.0
QUICK_S = 60.0
"""A server that exits sooner than this after its start counts as failed to start."""
MAX_QUICK_ENDS = 5
"""Number of consecutive failed starts after which to give up on a server."""


class StopRequested(Exception):  # noqa: N818  # no error
    """SIGTERM or SIGINT has arrived."""


def main(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 0 then, or 1 after giving up on a server."""
    config = load_run_config(RlRunConfig, Path(args.config), args.overrides)
    engine = config.served
    if engine is None:
        raise ConfigError(
            f'rl.engine.kind="{config.rl.engine.kind}" has no servers. Set rl.engine.kind="vllm" or "sglang".'
        )
    on_gpu = config.platform.device == "cuda" or (config.platform.device == "auto" and GPU_DEVICE.exists())
    folder, size = servers_folder(config.run_dir), engine.tensor_parallel
    # Servers on several machines share the folder, and each writes its own files there.
    of_host = folder / socket.gethostname()
    command = partial(server_command, config, of_host, host=EVERYWHERE, on_gpu=on_gpu)
    servers: list[ServerProcess] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        for index in range(args.count):
            port = args.port + index
            servers.append(
                ServerProcess(
                    command,
                    folder / f"{of_host.name}_{port}.log",
                    devices=range(index * size, (index + 1) * size) if on_gpu else (),
                    port=port,
                )
            )
            _write(f"{servers[-1].url}: started, its output is in {servers[-1].log}")
        return _watch(folder, servers)
    except StopRequested:
        return 0
    finally:
        for server in servers:
            server.close()


def _watch(folder: Path, servers: list[ServerProcess]) -> int:
    """Restart servers that exit or that the training asks to restart; return 1 after giving up on a server."""
    quick_ends = dict.fromkeys(range(len(servers)), 0)
    since_s = time.time()
    while True:
        time.sleep(LOOK_S)
        for index, server in enumerate(servers):
            port = server.url.rsplit(":", 1)[1]
            request = replacement_request(folder, f"http://{socket.gethostname()}:{port}")
            if not server.is_alive:
                quick_ends[index] = quick_ends[index] + 1 if server.age_s < QUICK_S else 1
                if quick_ends[index] >= MAX_QUICK_ENDS:
                    _write(f"{server.url} {server.ending()}")
                    return 1
                reason = "it has ended"
            elif request.exists() and request.stat().st_mtime > since_s:
                reason = f"the training asks for it ({request.read_text(encoding='utf-8').strip()})"
                request.unlink(missing_ok=True)
            else:
                continue
            server.restart()
            _write(f"{server.url}: started anew, as {reason}")


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopRequested


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
