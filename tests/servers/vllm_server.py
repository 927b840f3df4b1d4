"""A real vLLM server on CPUs, started as `rl.engine.kind="vllm"` needs it, and a model that trains beside it."""

import copy
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import Router
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, local_shards
from mcore_rl.model.hf_stream import WeightStream
from mcore_rl.rl.engines.base import Capabilities, Sampling
from mcore_rl.rl.engines.served import ServedEngine
from mcore_rl.rl.engines.server_api import HttpClient, Owner, ServedCompletion, ServerApi
from mcore_rl.rl.engines.server_process import ServerFleet, model_folder
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.engines.weight_push import PushReport, WeightPush
from mcore_rl.rl.sampling import Cut
from mcore_rl.storage.checksums import crc32_of
from mcore_rl.workers.launcher import free_port
from tests.double import doubled, in_double
from tests.sections import engine_config

MAX_TOKENS = 512
NEARLY_ALIKE = 5e-6
"""Difference of the probabilities of two experts that rounding in fp32 may turn around."""
ROOT = Path(__file__).parents[2]
FORKED = Path(__file__).with_name("forked_vllm.py")
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
}
"""Environment of every server."""
UNTRIED: list[str] = []
"""Why runs refuse the version of each server that has been started; empty for versions of the protocol's table."""
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn_hidden_size": 256,
    "vocab_size": 2048,
    "vocab_multiple": 16,
    "max_position": MAX_TOKENS,
}
EXPERTS = MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=128)
MODELS = {
    "qwen3_moe": ModelConfig(family="qwen3_moe", moe=EXPERTS, **SHAPE),
    "qwen2_moe, tied": ModelConfig(
        family="qwen2_moe",
        tied_embeddings=True,
        moe=EXPERTS.model_copy(update={"shared_experts": 1, "shared_ffn_hidden_size": 192, "normalize_top_k": False}),
        **SHAPE,
    ),
}

FAULTS = {
    "one tensor left old": ("layers.2.mlp.gate.weight",),
    "half an update": ("layers.2.", "layers.3."),
    "an expert missing": ("layers.1.mlp.experts.5.",),
    "q without k and v": ("k_proj", "v_proj"),
    "a tied head left old": ("lm_head.weight",),
}
"""Tensors that an update leaves out, by the beginning or a part of their names."""


@functools.cache
def warm(python: str, *, interpreted: bool) -> "subprocess.Popen[str]":
    """The process that has imported vLLM, and forks servers until these tests end."""
    environment = os.environ | SETTINGS | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    return subprocess.Popen(
        [python, str(FORKED)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


class VllmServer:
    """A server of a model with random weights of vLLM's own; nothing of it outlives `close`. `interpreted`: with the
    model runner of GPUs, which alone records routes, and Triton's interpreter, which takes half a second a token.
    """

    def __init__(
        self,
        python: str,
        model: ModelConfig,
        folder: Path,
        backend: str = "mcore_files",
        dtype: str = "float32",
        arguments: Sequence[str] = (),
        *,
        port: int | None = None,
        interpreted: bool = False,
    ) -> None:
        folder.mkdir(parents=True)
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        arguments = [
            *arguments,
            *("--model", str(model_folder(model, dtype, folder)), "--served-model-name", "policy"),
            *("--load-format", "dummy"),
            *("--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enable-scale-out"),
            *("--dtype", dtype, "--max-model-len", str(MAX_TOKENS), "--max-num-seqs", "64"),
            *("--enforce-eager", "--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", "mcore_rl.vllm_worker.Extension"),
            *("--weight-transfer-config", json.dumps({"backend": backend})),
        ]
        one = warm(python, interpreted=interpreted)
        assert one.stdin is not None and one.stdout is not None
        print(json.dumps([str(self.log), arguments]), file=one.stdin, flush=True)
        self.process = psutil.Process(int(one.stdout.readline()))
        self.api = VllmApi(
            HttpClient(self.url),
            vocab_size=model.vocab_size,
            request_timeout_s=600,
            update_timeout_s=600,
            owner=Owner("0123abcd", "tests"),
        )

    def wait(self, timeout_s: float = 900.0) -> "VllmServer":
        """Return when the server answers."""
        until_healthy(self.api, self.process.is_running, self.log, timeout_s)
        try:
            self.api.refuse_untried()
        except EngineError as error:  # whether it works is what the tests find out
            UNTRIED.append(str(error))
        return self

    def workers(self) -> list[psutil.Process]:
        """Return the processes below that of the API."""
        return self.process.children(recursive=True)

    def close(self) -> None:
        """End all processes: after the death of a worker that of the API can stay and answer nobody."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, psutil.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(20)


def until_healthy(api: ServerApi, is_alive: Callable[[], bool], log: Path, timeout_s: float = 900.0) -> None:
    """Return when the server answers."""
    end_s = time.monotonic() + timeout_s
    while not api.is_healthy():
        assert is_alive() and time.monotonic() < end_s, log.read_text()[-3000:]
        time.sleep(1)


class OmittingApi(VllmApi):
    """Leaves out tensors of a push, or sends old ones, and tells nobody."""

    omitted: tuple[str, ...] = ()
    old: Mapping[str, Tensor] = MappingProxyType({})
    """Tensors that are sent in the place of omitted ones; what has none is left out."""

    def load(self, update: Mapping[str, Any]) -> None:
        """Load what is left of a bucket."""
        paths = [Path(file["path"]) for file in update["files"]]
        tensors = {
            name: self.old.get(name, tensor) if any(part in name for part in self.omitted) else tensor
            for path in paths
            for name, tensor in load_file(path).items()
            if name in self.old or not any(part in name for part in self.omitted)
        }
        if tensors:
            save_file(tensors, paths[0])
            super().load({"files": [{"path": str(paths[0]), "crc32": crc32_of(paths[0])}]})


class Trainer:
    """A model on one rank whose weights a test sets by seeds."""

    def __init__(self, model: ModelConfig, mesh: Mesh, precision: Literal["fp32", "bf16"] = "fp32") -> None:
        settings = PlatformConfig(precision=precision, layers="torch")
        self.model, self.mesh = model, mesh
        self.chunks: list[nn.Module] = build_model(model, mesh, start(settings), settings)
        self.version = 0

    @torch.no_grad()
    def randomize(self, seed: int, part: str = "") -> None:
        """Set the weights whose keys contain `part` to those of a seed."""
        generator = torch.Generator().manual_seed(seed)
        for shard in local_shards(self.chunks):
            noise = torch.randn(shard.data.shape, generator=generator)
            if part in shard.key:
                is_norm = "norm" in shard.key
                shard.data.copy_(1 + 0.3 * noise if is_norm else 0.07 * noise)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors of a push by Hugging Face's names."""
        return {
            name: tensor.clone()
            for bucket in WeightStream(self.chunks, self.mesh, self.model)
            for name, tensor in bucket.tensors.items()
        }

    def push(self, *apis: VllmApi, **engine: Any) -> PushReport:
        """Give the weights to servers as the next version."""
        self.version += 1
        return self.pushing(*apis, **engine).push(self.version)

    def pushing(self, *apis: VllmApi, **engine: Any) -> WeightPush:
        """Return what gives the weights of one run to servers, push by push."""
        config = engine_config(kind="vllm", urls=tuple(api.url for api in apis), **engine)
        return WeightPush(apis, self.chunks, self.mesh, self.model, config, Sampling(max_new_tokens=1))

    def logprobs(
        self, prompt_T: Sequence[int], tokens_T: Sequence[int], temperature: float = 1.0, vocab_size: int | None = None
    ) -> tuple[list[float], int]:
        """Return the logprobs of a completion by one teacher-forced pass of the modules that train, and how many of its
        tokens are sure to take the same routes in a server; ids from `vocab_size` on cannot be drawn.

        The pass is in fp64: in fp32 its own rounding is 7e-6 of the 1e-5 that are allowed. A token whose experts K and
        K + 1 are nearly alike takes either by rounding, and the tokens after it read what it wrote: none is compared.
        """
        logits_SV, probs_LSE = self._passed((*prompt_T, *tokens_T))
        first = len(prompt_T) - 1
        logits_TV = logits_SV[first:-1, : vocab_size or self.model.vocab_size] / temperature
        picked_T1 = logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens_T)[:, None])
        assert len(probs_LSE) == sum(self.model.moe_layers) and picked_T1.dtype == torch.float64
        if not probs_LSE:
            return picked_T1[:, 0].tolist(), len(tokens_T)
        return picked_T1[:, 0].tolist(), min(max(0, self._num_sure(probs_LSE) - first), len(tokens_T))

    def routes(self, tokens_S: Sequence[int]) -> tuple[Tensor, int]:
        """Return the experts of each token by one pass of the modules that train, `[tokens, layers, K]`, in ascending
        order, and how many tokens are sure to take the same routes in a server.
        """
        _, probs_LSE = self._passed(tokens_S)
        routes_LSK = torch.stack(probs_LSE).topk(self.model.moe.top_k).indices.sort(-1).values
        return routes_LSK.transpose(0, 1), self._num_sure(probs_LSE)

    def _num_sure(self, probs_LSE: Sequence[Tensor]) -> int:
        top_LSK = torch.stack(list(probs_LSE)).topk(self.model.moe.top_k + 1).values
        alike = ((top_LSK[..., -2] - top_LSK[..., -1]).amin(0) < NEARLY_ALIKE).nonzero()
        return int(alike[0]) if len(alike) else top_LSK.shape[1]

    @torch.no_grad()
    def _passed(self, tokens_S: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the logits after each token, and the experts' probabilities, layer by layer."""
        probs_LSE = list[Tensor]()

        def measure(router: nn.Module, inputs: tuple[Tensor, ...], _: object) -> None:
            probs_LSE.append((inputs[0][:, 0] @ router.weight.mT).softmax(-1))

        ids_1S = torch.tensor([list(tokens_S)])
        positions_1S = torch.arange(ids_1S.shape[1])[None]
        # Process groups, which cannot be copied, are those of the copy too.
        with patch.object(dist.ProcessGroup, "__deepcopy__", lambda group, memo: group, create=True):
            model = doubled(copy.deepcopy(self.chunks[0])).eval()
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(measure)
            elif "inv_freq" in vars(module):
                module.inv_freq = module.inv_freq.float()  # angles as servers have them: rounded at late positions
        with in_double():
            return model(ids_1S, positions_1S, attention_mask=None)[0], probs_LSE

    def compared(
        self,
        pairs: Iterable[tuple[Sequence[int], ServedCompletion]],
        temperature: float,
        *,
        start: int = 0,
        ends: Sequence[int] | None = None,
    ) -> "Compared":
        """Compare the logprobs of tokens start ... end - 1 of completions, each with its prompt, with the trainer's."""
        worst, after_ties, num_tokens, num_compared = 0.0, 0.0, 0, 0
        for index, (prompt_T, made) in enumerate(pairs):
            ours_T, num_sure = self.logprobs(prompt_T, made.tokens_T, temperature)
            end = len(ours_T) if ends is None else ends[index]
            apart = [abs(a - b) for a, b in zip(ours_T, made.logprobs_T, strict=True)]
            sure = apart[start : min(end, num_sure)]
            worst = max([worst, *sure])
            after_ties = max([after_ties, *apart[max(start, num_sure) : end]])
            num_tokens += end - start
            num_compared += len(sure)
        return Compared(worst, num_compared / num_tokens, after_ties)


def served_engine(
    server: VllmServer, trainer: Trainer, folder: Path, decode: Callable[[Sequence[int]], str]
) -> ServedEngine:
    """The engine of one server that runs, which gets the trainer's weights by `update_weights`."""
    config = engine_config(kind="vllm", urls=(server.url,))
    return ServedEngine(
        lambda url: server.api,
        ServerFleet(config, lambda url: server.api, folder, None),
        trainer.chunks,
        trainer.mesh,
        trainer.model,
        decode,
        config,
        sampling=Sampling(max_new_tokens=1),
        capabilities=Capabilities(max_tokens=MAX_TOKENS, routes=False, seeded=False),
    )


@dataclass(frozen=True)
class Compared:
    """Logprobs of a server beside the trainer's, in nats."""

    largest: float
    """Largest difference of the tokens that are sure to take the same routes."""
    compared_fraction: float
    """Their fraction of all tokens."""
    after_ties: float
    """Largest difference of the others; 0 without one."""


def generated(
    apis: Sequence[VllmApi],
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    temperature: float,
    salt: str,
    seed: int = 0,
) -> list[ServedCompletion]:
    """Return a completion of each prompt, all asked for at the same time, of the servers in turn."""
    sampling = Sampling(max_new_tokens=max_new, cut=Cut(temperature=temperature))

    def one(index: int) -> ServedCompletion:
        api = apis[index % len(apis)]
        return api.generate(prompts[index], sampling, seed + index, salt=salt, request_id=f"{salt}-{seed}-{index}")

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, range(len(prompts))))


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, length), generator=generator).tolist()
