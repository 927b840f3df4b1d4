"""The section `rl.engine`: what makes completions."""

from functools import cached_property
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Seconds, Section, Text

NATIVE_SLOTS = 64


class EngineConfig(Section):
    """Computation of completions, in this process or by inference servers: it changes speed and memory, not what is
    sampled from.
    """

    kind: str
    """Engine; `native`: the modules that train; `vllm` and `sglang`: servers, started by the run (`count`) or before it
    (`urls`), which get the new weights after every rollout batch; `module:name`: a function of your own with the
    arguments of rl.engines.make.native_engine, which returns an rl.engines.base.Engine."""
    slots: PositiveInt | Literal["auto"] = "auto"
    """Most completions in progress at a time: with `native` on each replica of the model, where each takes keys and
    values of the longest; with servers on each one that is started (--max-num-seqs, --max-running-requests); `auto`:
    64, or as many as the server chooses."""

    @cached_property
    def is_served(self) -> bool:
        """Whether inference servers make the completions."""
        return isinstance(self, ServedConfig)


class InProcessConfig(EngineConfig):
    """Steps of the engine on the modules that train, or on copies of them."""

    step_tokens: PositiveInt = 2048
    """Most tokens of one step: one of each completion in progress, and parts of prompts."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Replay steps without prompts as CUDA graphs, which starts a step's kernels at once; `auto`: on a GPU that holds
    the model whole and whose host reads nothing within a step; not yet run on a GPU."""

    @cached_property
    def native_slots(self) -> int:
        """Completions in progress at a time on each replica of the model."""
        return NATIVE_SLOTS if self.slots == "auto" else self.slots


class ServersConfig(EngineConfig):
    """Inference servers."""

    count: NonNegativeInt = 0
    """Servers that the run starts on the machine of its first rank, and ends with itself."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that run already, as http://node7:8000, instead of `count`."""
    command: tuple[str, ...] = ()
    """Program that starts a server, and its first arguments, as ["venv-vllm/bin/python", "-m",
    "vllm.entrypoints.openai.api_server"]; an empty list: the module of vLLM or SGLang in the Python of this run."""
    args: tuple[str, ...] = ()
    """Further arguments of each server that is started, as ["--gpu-memory-utilization", "0.8"]."""
    devices: tuple[NonNegativeInt, ...] = ()
    """GPUs of the servers that are started, `tensor_parallel` for each in order; an empty list: those that the run
    sees."""
    tensor_parallel: PositiveInt = 1
    """GPUs of each server that is started."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the servers' weights; `auto`: that of platform.precision."""
    max_model_len: PositiveInt | Literal["auto"] = "auto"
    """Largest number of tokens of prompt and completion together that a server holds; `auto`: that of the longest
    sample."""
    requests: PositiveInt = 256
    """Completions in progress at a time that each replica of the trained model asks servers for."""
    attempts: PositiveInt = 3
    """Number of times that a completion is asked for, each time of another server while there is one."""
    min_servers: PositiveInt = 1
    """Fewest servers with the present weights; with fewer the run ends."""
    start_timeout_s: Seconds = 900.0
    """Seconds until a server that was started, or that `urls` names, has to answer."""
    request_timeout_s: Seconds = 1800.0
    """Seconds that a server may take for a completion."""
    update_timeout_s: Seconds = 600.0
    """Seconds that a server may take for each call of an update of weights."""
    transport_dir: Text | None = None
    """Folder of weights on their way to the servers, which trainer and servers see; `none`: /dev/shm, which is one
    machine's memory."""
    probe_tolerance: PositiveFloat | Literal["auto"] = "auto"
    """Limit in nats of the difference between a server's and the trainer's logprobs of fixed texts after an update: of
    the largest where both compute in fp32, else of the mean; `auto`: 2e-4, or three times the mean that rounding makes
    within the trainer, 0.1 at most, and then the tokens of each expert are compared with the others too."""
    api_key_env: Text | None = None
    """Name of the environment variable with the key that servers ask for (--api-key); `none`: they ask for none."""
    ca_file: Text | None = None
    """File of the certificates by which https servers of `urls` are known; `none`: those of the system."""


class ServedConfig(ServersConfig):
    """Inference servers of a kind that the run can start and update."""

    kind: Literal["vllm", "sglang"]

    @cached_property
    def broadcasts(self) -> bool:
        """Whether new weights come to the servers by a broadcast between GPUs, and not by files."""
        return False


class NativeConfig(InProcessConfig):
    """The modules that train."""

    kind: Literal["native"] = "native"


class VllmConfig(ServedConfig):
    """Servers of vLLM."""

    kind: Literal["vllm"] = "vllm"
    transport: Literal["files", "nccl"] = "files"
    """Path of new weights to the servers: files in `transport_dir`, or a broadcast between GPUs."""

    @cached_property
    def broadcasts(self) -> bool:
        """Whether new weights come to the servers by a broadcast between GPUs, and not by files."""
        return self.transport == "nccl"


class SglangConfig(ServedConfig):
    """Servers of SGLang, which read new weights from files."""

    kind: Literal["sglang"] = "sglang"


class OwnEngineConfig(ServersConfig, InProcessConfig):
    """A function of the user's own, which may read any field."""

    kind: Extension


SERVED: dict[str, type[VllmConfig | SglangConfig]] = {"vllm": VllmConfig, "sglang": SglangConfig}
"""Sections of servers by their kind."""
AnyEngine = NativeConfig | VllmConfig | SglangConfig | OwnEngineConfig
