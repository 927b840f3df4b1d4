"""The section `rl.engine`: how completions are generated."""

from functools import cached_property
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Seconds, Section, Text

NATIVE_SLOTS = 64
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""


class EngineConfig(Section):
    """How completions are generated, in this process or by inference servers: this affects speed and memory, not the
    distribution that is sampled from.
    """

    kind: str
    """Engine; `native`: the modules that train; `vllm` and `sglang`: servers, started by the run (`count`) or before it
    (`urls`), which get the new weights after every rollout batch; `module:name`: a function of your own with the
    arguments of rl.engines.base.MakeEngine, which returns an rl.engines.base.Engine."""
    slots: PositiveInt | Literal["auto"] = "auto"
    """Maximum number of completions in progress; `native`: on each replica of the model, each with memory for the keys
    and values of the longest sample; servers: on each server that is started (--max-num-seqs, --max-running-requests);
    `auto`: 64, or as many as the server chooses."""

    @cached_property
    def is_served(self) -> bool:
        """Whether inference servers make the completions."""
        return isinstance(self, ServedConfig)


class InProcessConfig(EngineConfig):
    """Steps of the engine on the modules that train, or on copies of them."""

    step_tokens: PositiveInt = 2048
    """Maximum number of tokens per step: a token for each completion in progress, and parts of prompts."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Replay steps without prompts as CUDA graphs, which launches all kernels of a step at once; `auto`: on a GPU that
    holds the whole model, if the host reads nothing within a step; not yet run on a GPU."""

    @cached_property
    def native_slots(self) -> int:
        """Completions in progress at a time on each replica of the model."""
        return NATIVE_SLOTS if self.slots == "auto" else self.slots


class ServersConfig(EngineConfig):
    """Inference servers."""

    count: NonNegativeInt = 0
    """Number of servers that the run starts on the machine of its first rank, and ends with itself."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that are already running, such as http://node7:8000, instead of `count`."""
    command: tuple[str, ...] = ()
    """Program that starts a server, with its first arguments, such as ["venv-vllm/bin/python", "-m",
    "vllm.entrypoints.openai.api_server"]; an empty list: the module of vLLM or SGLang in the Python of this run."""
    args: tuple[str, ...] = ()
    """Further arguments of each server that is started, such as ["--gpu-memory-utilization", "0.8"]."""
    devices: tuple[NonNegativeInt, ...] = ()
    """GPUs of the servers that are started, `tensor_parallel` for each in order; an empty list: all that the run
    sees."""
    tensor_parallel: PositiveInt = 1
    """GPUs of each server that is started."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the servers' weights; `auto`: as platform.precision."""
    max_model_len: PositiveInt | Literal["auto"] = "auto"
    """Maximum number of tokens of prompt and completion together that a server accepts; `auto`: the length of the
    longest sample."""
    requests: PositiveInt = 256
    """Maximum number of completions that each replica of the trained model requests from servers at a time."""
    attempts: PositiveInt = 3
    """Attempts per completion, each on a server that has not failed it yet, if any is left."""
    min_servers: PositiveInt = 1
    """Minimum number of servers with the current weights; with fewer the run ends."""
    start_timeout_s: Seconds = 900.0
    """Seconds within which a server that was started, or that `urls` names, has to answer."""
    request_timeout_s: Seconds = 1800.0
    """Seconds that a server may take for a completion."""
    update_timeout_s: Seconds = 600.0
    """Seconds that a server may take for each call of a weight update."""
    lora: Literal["merged", "adapter"] = "merged"
    """Form in which servers get a policy with low-rank adapters; `merged`: whole weights, with the adapters added;
    `adapter`: only the adapters, each time under a new name, over a base model that the servers have loaded
    themselves."""
    base_model: Text | None = None
    """Hugging Face folder of the base model, which servers that are started load with `lora` = "adapter"; `none`: they
    get all weights from the trainer."""
    transport_dir: Text | None = None
    """Folder for weights on their way to the servers, visible to trainer and servers; `none`: /dev/shm, which is local
    to a machine."""
    probe_tolerance: PositiveFloat | Literal["auto"] = "auto"
    """Limit in nats on the difference between a server's and the trainer's logprobs of fixed texts after an update: on
    the largest difference if both compute in fp32, else on the mean; `auto`: 2e-4 in fp32, else three times the mean
    that rounding makes within the trainer, at most 0.1, and the tokens of each expert are also compared with the
    rest."""
    api_key_env: Text | None = None
    """Name of the environment variable with the key that servers require (--api-key); `none`: no key."""
    ca_file: Text | None = None
    """File of the certificates to verify https servers of `urls` with; `none`: the system's certificates."""


class ServedConfig(ServersConfig):
    """Inference servers of a kind that the run can start and update."""

    kind: Literal["vllm", "sglang"]

    @cached_property
    def broadcasts(self) -> bool:
        """Whether new weights reach the servers by a broadcast between GPUs instead of files."""
        return False


class NativeConfig(InProcessConfig):
    """Generation by the modules that train."""

    kind: Literal["native"] = "native"


class VllmConfig(ServedConfig):
    """Servers of vLLM."""

    kind: Literal["vllm"] = "vllm"
    transport: Literal["files", "nccl"] = "files"
    """How new weights reach the servers; `files`: files in `transport_dir`; `nccl`: a broadcast between GPUs."""

    @cached_property
    def broadcasts(self) -> bool:
        """Whether new weights reach the servers by a broadcast between GPUs instead of files."""
        return self.transport == "nccl"


class SglangConfig(ServedConfig):
    """Servers of SGLang, which read new weights from files."""

    kind: Literal["sglang"] = "sglang"


class OwnEngineConfig(ServersConfig, InProcessConfig):
    """A user-defined function, which may read any field."""

    kind: Extension


SERVED: dict[str, type[VllmConfig | SglangConfig]] = {"vllm": VllmConfig, "sglang": SglangConfig}
"""Sections of servers by their kind."""
AnyEngine = NativeConfig | VllmConfig | SglangConfig | OwnEngineConfig
