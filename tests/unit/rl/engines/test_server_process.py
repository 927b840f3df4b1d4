"""Servers as processes: their command, their log, and that nothing of them stays."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.rl.engines.server_api import HttpClient, Owner, ServerApi
from mcore_rl.rl.engines.server_process import ServerFleet, ServerProcess, server_command
from mcore_rl.rl.engines.vllm_api import VllmApi

OWNER = Owner("0123abcd", "/runs/a")
FAKE = str(Path(__file__).parents[4] / "tests" / "fake_server.py")


def config_of(tmp_path: Path, *overrides: str) -> RlRunConfig:
    path = tmp_path / "rl.toml"
    path.write_text("[rl.prompts]\ntask = 'arithmetic'\nmax_tokens = 100\n[rl.rollout]\nmax_new_tokens = 28\n")
    command = json.dumps([sys.executable, FAKE])
    return load_config(RlRunConfig, path, ["rl.engine.kind=vllm", f"rl.engine.command={command}", *overrides])


def api_at(url: str) -> ServerApi:
    return VllmApi(HttpClient(url), vocab_size=64, request_timeout_s=5.0, update_timeout_s=5.0, owner=OWNER)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_command_of_vllm_has_what_the_run_needs(tmp_path: Path) -> None:
    args = 'rl.engine.args=["--gpu-memory-utilization", "0.8"]'
    config = config_of(tmp_path, "replay.kind=r3", args, "platform.precision=fp32")
    config = config.model_copy(update={"model": config.model.model_copy(update={"family": "qwen3_moe"})})
    found = server_command(config, tmp_path / "servers", 8001, on_gpu=True)
    assert found.command == (
        *(sys.executable, FAKE, "--model", str(tmp_path / "servers/model"), "--served-model-name", "policy"),
        *("--load-format", "dummy", "--host", "127.0.0.1", "--port", "8001", "--skip-tokenizer-init"),
        *("--dtype", "float32", "--max-model-len", "128", "--tensor-parallel-size", "1"),
        *(() if not config.wants_engine_routes else ("--enable-return-routed-experts",)),
        *("--enable-scale-out", "--worker-extension-cls", "mcore_rl.vllm_worker.Extension"),
        *("--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "mcore_files"}'),
        *("--gpu-memory-utilization", "0.8"),
    )
    assert found.settings["VLLM_SERVER_DEV_MODE"] == "1" and not found.defaults
    written = json.loads((tmp_path / "servers/model/config.json").read_text())
    assert written["model_type"] == "qwen3_moe" and written["torch_dtype"] == "float32"
    # The folder on the path of vLLM's workers has nothing of this package that could import its torch.
    (package,) = Path(found.python_path[0]).iterdir()
    assert sorted(path.name for path in package.iterdir()) == ["__init__.py", "vllm_worker.py"]


@pytest.mark.parametrize(
    ("kind", "rank", "wanted"),
    [
        ("vllm", 16, ("--max-lora-rank", "16", "--max-loras", "2", "--max-cpu-loras", "2")),
        ("vllm", 17, ("--max-lora-rank", "32", "--max-loras", "2", "--max-cpu-loras", "2")),
        ("sglang", 17, ("--max-lora-rank", "17", "--max-loras-per-batch", "2", "--lora-target-modules")),
    ],
)
def test_a_server_of_adapters_loads_its_base_and_takes_their_rank(kind, rank, wanted, tmp_path):
    words = (f"rl.engine.kind={kind}", "rl.engine.lora=adapter", "rl.engine.base_model=/base")
    found = server_command(config_of(tmp_path, *words, f"lora.rank={rank}"), tmp_path / "s", 1, on_gpu=True)
    command = found.command
    model = command[command.index("--model" if kind == "vllm" else "--model-path") + 1]
    assert (model, command[command.index("--load-format") + 1]) == ("/base", "auto")
    first = command.index("--enable-lora") + 1
    assert command[first : first + len(wanted)] == wanted
    assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in found.settings) == (kind == "vllm")


def test_the_command_follows_the_sampling_the_device_and_the_kind(tmp_path: Path) -> None:
    cut = server_command(config_of(tmp_path, "rl.rollout.top_p=0.9"), tmp_path / "s", 1, on_gpu=False)
    words = list(cut.command)
    assert words[words.index("--logprobs-mode") + 1] == "raw_logprobs" and words[-1] == "--enforce-eager"
    assert cut.defaults["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    many = server_command(config_of(tmp_path, "rl.engine.slots=9"), tmp_path / "s", 1, on_gpu=True).command
    assert many[many.index("--max-num-seqs") + 1] == "9"
    other = config_of(
        *(tmp_path, "rl.engine.kind=sglang", "rl.engine.dtype=bf16", "rl.engine.tensor_parallel=4"), "rl.engine.slots=9"
    )
    assert server_command(other, tmp_path / "s", 1, on_gpu=True).command[2:] == (
        *("--model-path", str(tmp_path / "s/model"), "--served-model-name", "policy", "--load-format", "dummy"),
        *("--host", "127.0.0.1", "--port", "1", "--skip-tokenizer-init", "--dtype", "bfloat16"),
        *("--context-length", "128", "--tp-size", "4", "--max-running-requests", "9"),
    )


def test_servers_start_are_replaced_when_they_fail_and_leave_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rl.engine.count=2")
    folder = tmp_path / "servers"

    def start(index: int) -> ServerProcess:
        command = lambda port: server_command(config, folder, port, on_gpu=False)  # noqa: E731
        return ServerProcess(command, folder / f"server_{index}.log")

    fleet = ServerFleet(config.rl.engine, api_at, folder, start)
    try:
        first, second = fleet.ready()
        assert [process.url for process in fleet.processes] == [first, second]
        assert "started with --served-model-name policy" in (folder / "server_0.log").read_text()
        before = psutil.Process().children(recursive=True)
        fleet.start_anew({first: "its probe failed"})
        wait_for(lambda: len(fleet.ready()) == 2)
        renewed = fleet.processes[0].url
        assert not api_at(first).is_healthy() and fleet.ready() == [renewed, second]
        assert fleet.lines == [
            f"{first} failed and is started again as {renewed}, which gets the weights with the next update: its probe "
            "failed"
        ]
        fleet.write_status([second], 3)
        assert json.loads((folder / "status.json").read_text()) == {
            "version": 3,
            "servers": [{"url": renewed, "is_serving": False}, {"url": second, "is_serving": True}],
        }
        assert len(psutil.Process().children(recursive=True)) == len(before)
    finally:
        fleet.close()
    wait_for(lambda: not any("fake_server" in " ".join(p.cmdline()) for p in children()))


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_does_not_start_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rl.engine.count=1", 'rl.engine.args=["--die"]')
    command = lambda port: server_command(config, tmp_path, port, on_gpu=False)  # noqa: E731
    fleet = ServerFleet(
        config.rl.engine, api_at, tmp_path, lambda index: ServerProcess(command, tmp_path / "server_0.log")
    )
    with pytest.raises(EngineError, match=r"(?s)server_0 ended with status 1.*server_0\.log:.*no memory left"):
        fleet.ready()
    fleet.close()


def test_servers_of_urls_that_are_silent_are_named(tmp_path: Path) -> None:
    urls = 'rl.engine.urls=["http://127.0.0.1:9"]'
    config = config_of(tmp_path, urls, "rl.engine.start_timeout_s=0.01")
    with pytest.raises(EngineError, match=r"0 of 1 servers answer.*silent: http://127\.0\.0\.1:9\. Raise"):
        ServerFleet(config.rl.engine, api_at, tmp_path, None).ready()


def test_a_server_gets_neither_the_ranks_variables_nor_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_run = {"RANK": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_ALGO": "Ring"}
    for name, value in (of_run | {"NCCL_SOCKET_IFNAME": "ib0", "CUDA_VISIBLE_DEVICES": "4,5,GPU-7"}).items():
        monkeypatch.setenv(name, value)
    words = ("rl.engine.count=1", "rl.engine.devices=[2]", 'rl.engine.environment={CUDA_DEVICE_MAX_CONNECTIONS="8"}')
    found = server_command(config_of(tmp_path, *words), tmp_path / "s", 1, on_gpu=True)
    own = dataclasses.replace(found, command=("env",))
    shown = ServerProcess(lambda port: own, tmp_path / "log", devices=(2, 0), port=1)
    wait_for(lambda: not shown.is_alive)
    lines = (tmp_path / "log").read_text().splitlines()
    assert {"NCCL_SOCKET_IFNAME=ib0", "CUDA_VISIBLE_DEVICES=GPU-7,4", "CUDA_DEVICE_MAX_CONNECTIONS=8"} <= set(lines)
    assert not {line.partition("=")[0] for line in lines} & of_run.keys()
    refusal = r"rl.engine.devices=\[3\] with CUDA_VISIBLE_DEVICES=4,5,GPU-7: .* the 3 that"
    with pytest.raises(ConfigError, match=refusal):
        ServerProcess(lambda port: found, tmp_path / "log", devices=(3,))
