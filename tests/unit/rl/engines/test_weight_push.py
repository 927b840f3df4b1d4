"""A push brings every tensor to every server, and its probe finds each way in which weights did not arrive."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mcore_rl.backend.platform import start
from mcore_rl.checksums import crc32_of
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl import EngineConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.model.build import build_model
from mcore_rl.model.global_tensors import copy_in, local_shards
from mcore_rl.model.hf_stream import bucket_of, iter_hf_weights
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.probe import Probe, ProbeDifference, difference_of, probe_limit
from mcore_rl.rl.engines.server_api import ServerError
from mcore_rl.rl.engines.weight_push import PushReport, WeightPush
from tests.hf_weights import to_global
from tests.tiny_models import TINY

MODEL = TINY["qwen3_moe"]
TIED = MODEL.model_copy(update={"tied_embeddings": True})
Tensors = dict[str, Tensor]
UPDATE = ["pause", "start", *["load"] * (3 + MODEL.num_layers), "finish 7", "reset", "resume", "probe"]
"""Calls of a push to a server: embedding, head, last norm, and a bucket a layer."""


class ModelServer:
    """Has weights by Hugging Face's names, and computes logprobs by a model of its own, whose head is its own too."""

    def __init__(
        self, url: str, weights: Tensors, logprobs: Callable[[Tensors, Sequence[int]], list[float]]
    ) -> None:
        self.url, self.weights = url, dict(weights)
        self.calls: list[str] = []
        self.takes: Callable[[str], bool] = lambda name: True
        self.fails_at: str | None = None
        self._logprobs = logprobs

    def _call(self, name: str) -> None:
        if name != self.calls[-1:] or name == "load":
            self.calls.append(name)
        if self.fails_at == name or self.fails_at == f"{name} {self.calls.count(name)}":
            raise ServerError(f"{self.url}: status 500: broken")

    def pause(self) -> None:
        self._call("pause")

    def start_update(self) -> None:
        self._call("start")

    def load(self, update: Mapping[str, Any]) -> None:
        self._call("load")
        path = Path(update["path"])
        assert crc32_of(path) == update["crc32"]
        self.weights |= {name: tensor for name, tensor in load_file(path).items() if self.takes(name)}

    def finish_update(self, version: int) -> None:
        self._call(f"finish {version}")

    def reset_caches(self) -> None:
        self._call("reset")

    def resume(self) -> None:
        self._call("resume")

    def prompt_logprobs(self, tokens_T: Sequence[int]) -> list[float]:
        if self.calls[-1] != "probe":
            self._call("probe")
        return self._logprobs(self.weights, tokens_T)


def built(model: ModelConfig, mesh: Mesh, seed: int) -> list[nn.Module]:
    """Return a model whose logits depend on each of its weights."""
    settings = PlatformConfig()
    chunks = build_model(model, mesh, start(settings), settings)
    randomize(chunks, seed)
    return chunks


@torch.no_grad()
def randomize(chunks: Sequence[nn.Module], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shard in local_shards(chunks):
        is_norm = shard.data.dim() == 1
        noise = torch.randn(shard.data.shape, generator=generator)
        shard.data.copy_(1 + 0.3 * noise if is_norm else 0.15 * noise)


def hf_weights(chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig) -> Tensors:
    found: Tensors = {}
    for bucket in iter_hf_weights(chunks, mesh, model):
        found |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    return found


class Served:
    """A trainer whose weights are new, and servers with the old ones."""

    def __init__(self, model: ModelConfig, mesh: Mesh) -> None:
        self.mesh, self.model = mesh, model
        self.chunks = built(model, mesh, seed=1)
        self.old = hf_weights(self.chunks, mesh, model)
        randomize(self.chunks, seed=2)
        self.new = hf_weights(self.chunks, mesh, model)
        self._servers_model = model.model_copy(update={"tied_embeddings": False})
        self._modules = built(self._servers_model, mesh, seed=3)
        self._loaded: dict[str, int] = {}
        self._lock = Lock()

    def server(self, url: str = "http://a:1") -> ModelServer:
        return ModelServer(url, self.old, self.logprobs)

    def logprobs(self, weights: Tensors, tokens_T: Sequence[int]) -> list[float]:
        return self.logprobs_of(weights, [tokens_T])[0]

    @torch.no_grad()
    def logprobs_of(self, weights: Tensors, tokens_NT: Sequence[Sequence[int]]) -> list[list[float]]:
        ids_NS = torch.tensor(tokens_NT)
        positions_NS = torch.arange(ids_NS.shape[1]).expand_as(ids_NS)
        with self._lock:  # servers are asked at the same time, and have one model
            if self._loaded != {name: id(tensor) for name, tensor in weights.items()}:
                copy_in(self._modules, to_global(weights, self._servers_model))
                self._loaded = {name: id(tensor) for name, tensor in weights.items()}
            logits_NSV = self._modules[0].eval()(ids_NS, positions_NS, attention_mask=None)
        logprobs_NSV = logits_NSV[:, :-1, : self.model.vocab_size].double().log_softmax(-1)
        return logprobs_NSV.gather(2, ids_NS[:, 1:, None])[..., 0].tolist()  # type: ignore[no-any-return]

    def push(self, *servers: ModelServer, **engine: Any) -> PushReport:
        config = EngineConfig(kind="vllm", urls=tuple(server.url for server in servers), **engine)
        return WeightPush(servers, self.chunks, self.mesh, self.model, config).push(7)


@pytest.fixture(scope="module")
def served(one_rank: Mesh) -> Served:
    return Served(MODEL, one_rank)


@pytest.fixture(scope="module")
def tied(one_rank: Mesh) -> Served:
    return Served(TIED, one_rank)


def test_a_push_gives_servers_every_tensor_in_the_order_of_calls_that_keeps_them_alive(
    served: Served, tmp_path: Path
) -> None:
    servers = served.server("http://a:1"), served.server("http://b:2")
    report = served.push(*servers, transport_dir=str(tmp_path))
    assert (report.living, dict(report.failed), report.version) == (("http://a:1", "http://b:2"), {}, 7)
    assert report.probe < 2e-5 and report.num_unreached_experts == 0
    for server in servers:
        assert server.calls == UPDATE
        assert server.weights.keys() == served.new.keys()
        assert all(torch.equal(server.weights[name], served.new[name]) for name in served.new)
    assert list(tmp_path.iterdir()) == []
    layers = [name for name in served.new if bucket_of(name) == "model.layers.0."]
    assert report.largest_bucket_bytes == sum(served.new[name].nbytes for name in layers)
    assert report.num_bytes == sum(tensor.nbytes for tensor in served.new.values())


def test_the_probe_finds_each_tensor_that_is_left_old(served: Served) -> None:
    """Every tensor of the last layer and of what is outside of the layers, one at a time."""
    probe = Probe(served.chunks, served.mesh, MODEL)
    ours = probe.logprobs()
    limit = probe_limit(is_fp32=True)
    names = [name for name in served.new if bucket_of(name) in (name, "model.layers.3.")]
    assert len(names) > 30
    for name in names:
        weights = served.new | {name: served.old[name]}
        difference = difference_of(ours, served.logprobs_of(weights, probe.sequences))
        assert not limit.holds(difference), name


FAULTS: dict[str, Callable[[str], bool]] = {
    "half an update": lambda name: "layers.2" not in name and "layers.3" not in name,
    "an expert missing": lambda name: "layers.1.mlp.experts.5." not in name,
    "q without k and v": lambda name: "k_proj" not in name and "v_proj" not in name,
    "nothing": lambda name: False,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_does_not_have_the_weights_fails_although_it_says_otherwise(
    fault: str, served: Served
) -> None:
    sound, broken = served.server("http://sound:1"), served.server("http://broken:2")
    broken.takes = FAULTS[fault]
    report = served.push(sound, broken)
    assert report.living == ("http://sound:1",)
    assert broken.calls == UPDATE
    assert report.failed.keys() == {"http://broken:2"}
    assert (
        "does not have the trainer's weights although its update succeeded"
        in report.failed["http://broken:2"]
    )
    assert report.probe < 2e-5 < 2e-4 < report.differences["http://broken:2"].largest


def test_a_tied_output_is_sent_and_the_probe_finds_the_one_that_is_left_old(tied: Served) -> None:
    sound, broken = tied.server("http://sound:1"), tied.server("http://broken:2")
    broken.takes = lambda name: name != "lm_head.weight"
    report = tied.push(sound, broken)
    assert report.living == ("http://sound:1",)
    assert torch.equal(sound.weights["lm_head.weight"], tied.new["model.embed_tokens.weight"])


@pytest.mark.parametrize("call", ["pause", "load 3", "reset"])
def test_a_server_that_fails_is_left_alone_and_the_others_go_on(call: str, served: Served) -> None:
    sound, broken = served.server("http://sound:1"), served.server("http://broken:2")
    broken.fails_at = call
    report = served.push(broken, sound)
    assert report.living == ("http://sound:1",) and sound.calls == UPDATE
    assert list(report.failed) == ["http://broken:2"] and "status 500" in report.failed["http://broken:2"]
    assert broken.calls == UPDATE[: len(broken.calls)] and broken.calls[-1] == call.split(" 3")[0]
    # The next push, of all weights, is what brings it back.
    broken.fails_at = None
    broken.calls.clear()
    assert served.push(broken, sound).living == ("http://broken:2", "http://sound:1")


def test_without_a_living_server_a_push_ends_and_says_why(served: Served, tmp_path: Path) -> None:
    server = served.server()
    server.fails_at = "pause"
    report = served.push(server)
    assert (report.living, report.probe) == ((), 0.0)
    missing = served.push(served.server(), transport_dir=str(tmp_path / "missing"))
    assert missing.living == () and "rl.engine.transport_dir" in missing.failed["http://a:1"]


def test_more_sequences_are_taken_until_all_experts_are_reached(one_rank: Mesh) -> None:
    model = MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"num_experts": 32})})
    chunks = built(model, one_rank, seed=4)
    probe = Probe(chunks, one_rank, model)
    logprobs = probe.logprobs()
    assert len(probe.sequences) > 6 and len(logprobs) == len(probe.sequences)
    # All experts have the same logit, so that every token takes the first two.
    for shard in local_shards(chunks):
        if shard.key.endswith("router.weight"):
            shard.data.detach().zero_()
    stuck = Probe(chunks, one_rank, model)
    stuck.logprobs()
    assert stuck.num_unreached == 4 * 30 and len(stuck.sequences) == 96


def test_a_limit_is_of_the_largest_difference_in_fp32_and_of_the_mean_in_bf16() -> None:
    fp32, bf16 = probe_limit(is_fp32=True), probe_limit(is_fp32=False)
    by_dtype = {
        dtype: probe_limit(is_fp32=True, dtype=dtype)
        for dtype in get_args(EngineConfig.model_fields["dtype"].annotation)
    }
    assert by_dtype == {"auto": fp32, "fp32": fp32, "bf16": bf16, "fp16": bf16}
    assert fp32.holds(ProbeDifference(1.9e-4, 1.0)) and not fp32.holds(ProbeDifference(2.1e-4, 0.0))
    assert bf16.holds(ProbeDifference(0.4, 0.02)) and not bf16.holds(ProbeDifference(0.4, 0.11))
    assert not probe_limit(is_fp32=True, tolerance=1e-6).holds(ProbeDifference(1e-5, 0.0))
    not_finite = difference_of([[-1.0, -2.0]], [[-1.0, math.nan]])
    assert not fp32.holds(not_finite) and not bf16.holds(not_finite)
