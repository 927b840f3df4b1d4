"""A push brings every tensor to every server, and its probe finds each way in which weights did not arrive."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in, local_shards
from mcore_rl.model.hf_stream import WeightStream, bucket_of
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.fp8_blocks import Fp8Stream
from mcore_rl.rl.engines.probe import Probe, ProbeDifference, difference_of, probe_limit
from mcore_rl.rl.engines.server_api import ServedCompletion, ServerError
from mcore_rl.rl.engines.weight_push import PushReport, WeightPush
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import VersionSpan
from mcore_rl.storage.checksums import crc32_of
from tests.fake_server import worker_engine
from tests.hf_weights import to_global
from tests.sections import engine_config
from tests.tiny_models import TINY
from tests.unit.convert.test_fp8 import exact, quantized

MODEL = TINY["qwen3_moe"]
TIED = MODEL.model_copy(update={"tied_embeddings": True})
SAMPLED = Cut(temperature=0.7)
COMPLETING = Lock()
Tensors = dict[str, Tensor]
Precision = Literal["fp32", "bf16"]
UPDATE = ["pause", "start", *["load"] * (3 + MODEL.num_layers), "finish 7", "reset", "resume", "probe"]
"""Calls of a push to a server: embedding, head, last norm, and a bucket a layer."""


class ModelServer:
    """Has weights by Hugging Face's names, and computes logprobs by a model of its own, whose head is its own too."""

    def __init__(
        self, url: str, weights: Tensors, logits: Callable[[Tensors, Sequence[Sequence[int]]], Tensor]
    ) -> None:
        self.url, self.weights = url, dict(weights)
        self.samples: Callable[[Tensor, Cut], Tensor] = lambda logits_V, cut: cut_off(logits_V, cut)
        self.reports: Callable[[Tensor, Tensor, Cut], Tensor] = lambda logits_CV, tokens_C, cut: of_tokens(
            logits_CV / cut.temperature, tokens_C
        )
        """Logprobs that it reports of sampled tokens, from the logits that predict them."""
        self.calls: list[str] = []
        self.undone = self.takings = 0
        self.takes: Callable[[str], bool] = lambda name: True
        self.fails_at: str | None = None
        self._logits = logits
        self.engine = worker_engine()

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
        for file in update["files"]:
            assert crc32_of(Path(file["path"])) == file["crc32"]
            tensors = dict(self.engine.bases.tensors(file)) if "version" in file else load_file(file["path"])
            self.weights |= {name: tensor for name, tensor in tensors.items() if self.takes(name)}

    def take(self, files: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
        self.takings += 1
        found = {file["name"]: self.engine.bases.take(file) for file in files}
        return {name: why for name, why in found.items() if why}

    def finish_update(self, version: int) -> None:
        self._call(f"finish {version}")

    def reset_caches(self) -> None:
        self._call("reset")

    def resume(self) -> None:
        self._call("resume")

    def undo_update(self) -> None:
        self.undone += 1

    def prompt_logprobs(self, tokens_T: Sequence[int]) -> list[float]:
        if self.calls[-1] != "probe":
            self._call("probe")
        logits_SV = self._logits(self.weights, [tokens_T])[0, :-1]
        return of_tokens(logits_SV, torch.tensor(tokens_T[1:])).tolist()  # type: ignore[no-any-return]

    def generate(
        self, prompt_T: Sequence[int], sampling: Sampling, seed: int, *, salt: str, request_id: str, adapter: None
    ) -> ServedCompletion:
        assert salt and adapter is None and self.calls[-1] == "probe"
        with COMPLETING:  # so that a change of the weights is loaded once a completion
            generator, tokens_T, cut = torch.Generator().manual_seed(seed), list(prompt_T), sampling.cut
            for _ in range(sampling.max_new_tokens):
                probabilities_V = self.samples(self._logits(self.weights, [tokens_T])[0, -1], cut).softmax(-1)
                tokens_T.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
            tokens_C = torch.tensor(tokens_T[len(prompt_T) :])
            logits_CV = self._logits(self.weights, [tokens_T])[0, len(prompt_T) - 1 : -1]
        return ServedCompletion(
            tokens_T=tuple(tokens_C.tolist()),
            logprobs_T=tuple(self.reports(logits_CV, tokens_C, cut).tolist()),
            finish="length",
            versions=(VersionSpan(7, 0, len(tokens_C)),),
            experts_TLK=None,
        )


def of_tokens(logits_CV: Tensor, tokens_C: Tensor) -> Tensor:
    return logits_CV.log_softmax(-1).gather(1, tokens_C[:, None])[:, 0]


def cut_off(logits_V: Tensor, cut: Cut, *, divides: bool = True) -> Tensor:
    """Logits `[..., V]` in vLLM's order: temperature, min-p, top-k, top-p."""
    tempered_V = logits_V / cut.temperature if divides else logits_V
    probabilities_V = tempered_V.softmax(-1)
    is_out_V = probabilities_V < cut.min_p * probabilities_V.amax(-1, keepdim=True)
    order_V = tempered_V.argsort(-1, descending=True).argsort(-1)
    is_out_V |= order_V >= (cut.top_k or tempered_V.shape[-1])
    kept_V = tempered_V.masked_fill(is_out_V, -math.inf).softmax(-1)
    sorted_V = kept_V.sort(-1, descending=True).values
    before_V = (sorted_V.cumsum(-1) - sorted_V).gather(-1, order_V)
    return tempered_V.masked_fill(is_out_V | (before_V >= cut.top_p), -math.inf)


def built(model: ModelConfig, mesh: Mesh, seed: int, precision: Precision = "fp32") -> list[nn.Module]:
    """Return a model whose logits depend on each of its weights."""
    settings = PlatformConfig(precision=precision)
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
    for bucket in WeightStream(chunks, mesh, model):
        found |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    return found


class Served:
    """A trainer whose weights are new, and servers with the old ones."""

    def __init__(
        self, model: ModelConfig, mesh: Mesh, precision: Precision = "fp32", servers_precision: Precision = "fp32"
    ) -> None:
        self.mesh, self.model = mesh, model
        self.chunks = built(model, mesh, seed=1, precision=precision)
        self.old = hf_weights(self.chunks, mesh, model)
        randomize(self.chunks, seed=2)
        self.new = hf_weights(self.chunks, mesh, model)
        self._servers_model = model.model_copy(update={"tied_embeddings": False})
        self.modules = built(self._servers_model, mesh, seed=3, precision=servers_precision)
        self._loaded: dict[str, int] = {}
        self._lock = Lock()

    def server(self, url: str = "http://a:1") -> ModelServer:
        return ModelServer(url, self.old, self.logits_of)

    def logprobs_of(self, weights: Tensors, tokens_NT: Sequence[Sequence[int]]) -> list[list[float]]:
        logprobs_NSV = self.logits_of(weights, tokens_NT)[:, :-1].log_softmax(-1)
        return logprobs_NSV.gather(2, torch.tensor(tokens_NT)[:, 1:, None])[..., 0].tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def logits_of(self, weights: Tensors, tokens_NT: Sequence[Sequence[int]]) -> Tensor:
        ids_NS = torch.tensor(tokens_NT)
        positions_NS = torch.arange(ids_NS.shape[1]).expand_as(ids_NS)
        with self._lock:  # servers are asked at the same time, and have one model
            if self._loaded != {name: id(tensor) for name, tensor in weights.items()}:
                copy_in(self.modules, to_global(weights, self._servers_model))
                self._loaded = {name: id(tensor) for name, tensor in weights.items()}
            logits_NSV = self.modules[0].eval()(ids_NS, positions_NS, attention_mask=None)
        return logits_NSV[..., : self.model.vocab_size].double()

    def push(self, *servers: ModelServer, cut: Cut = SAMPLED, ids: int | None = None, **engine: Any) -> PushReport:
        config = engine_config(kind="vllm", urls=tuple(server.url for server in servers), **engine)
        sampling = Sampling(max_new_tokens=5, cut=cut, vocab_size=ids)
        return WeightPush(servers, self.chunks, self.mesh, self.model, config, sampling).push(7)


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


@pytest.mark.full
def test_with_delta_a_push_has_the_differences_and_after_a_failed_one_all_bytes(one_rank: Mesh, tmp_path: Path) -> None:
    served = Served(MODEL, one_rank)
    server = served.server()
    settings = engine_config(kind="vllm", urls=(server.url,), delta=True, transport_dir=str(tmp_path))
    push = WeightPush([server], served.chunks, one_rank, MODEL, settings, Sampling(max_new_tokens=5, cut=SAMPLED))  # type: ignore[list-item]
    whole = sum(tensor.nbytes for tensor in served.new.values())

    def step() -> PushReport:
        with torch.no_grad():
            for shard in local_shards(served.chunks):
                shard.data[..., 0] *= 1.001
        return push.push(7)

    reports = [step(), step()]
    assert [report.living for report in reports] == [(server.url,)] * 2
    assert reports[0].num_bytes == whole and reports[1].num_bytes < whole / 2
    server.fails_at = "start"
    assert step().living == ()
    server.fails_at = None
    last = step()
    assert last.living == (server.url,) and last.num_bytes == whole and server.takings == 3 * UPDATE.count("load")
    wanted = hf_weights(served.chunks, one_rank, MODEL)
    assert all(torch.equal(server.weights[name], wanted[name]) for name in wanted)


@pytest.mark.full
def test_the_probe_finds_each_tensor_that_is_left_old(served: Served) -> None:
    """Every tensor of the last layer and of what is outside of the layers, one at a time."""
    probe = Probe(served.chunks, served.mesh, MODEL)
    ours = probe.reference()
    names = [name for name in served.new if bucket_of(name) in (name, "model.layers.3.")]
    assert len(names) > 30
    for name in names:
        weights = served.new | {name: served.old[name]}
        difference = ours.difference(served.logprobs_of(weights, probe.sequences))
        assert not ours.limit.holds(difference), name


FAULTS: dict[str, Callable[[str], bool]] = {
    "half an update": lambda name: "layers.2" not in name and "layers.3" not in name,
    "an expert missing": lambda name: "layers.1.mlp.experts.5." not in name,
    "q without k and v": lambda name: "k_proj" not in name and "v_proj" not in name,
    "nothing": lambda name: False,
}


@pytest.mark.matrix("an expert missing")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_does_not_have_the_weights_fails_although_it_says_otherwise(fault: str, served: Served) -> None:
    sound, broken = served.server("http://sound:1"), served.server("http://broken:2")
    broken.takes = FAULTS[fault]
    report = served.push(sound, broken)
    assert report.living == ("http://sound:1",)
    assert broken.calls == UPDATE
    assert report.failed.keys() == {"http://broken:2"}
    assert "does not have the trainer's weights although its update succeeded" in report.failed["http://broken:2"]
    assert report.probe < 2e-5 < 2e-4 < report.differences["http://broken:2"].largest


NUCLEUS, TOP = Cut(top_p=0.8), Cut(top_k=5)
REPORTS: dict[str, tuple[Cut, Callable[[Tensor, Tensor, Cut], Tensor]]] = {
    "raw_logprobs": (SAMPLED, lambda z, y, cut: of_tokens(z, y)),
    "raw_logprobs at a high temperature": (Cut(temperature=1.5), lambda z, y, cut: of_tokens(z, y)),
    "processed_logprobs with top-p": (NUCLEUS, lambda z, y, cut: of_tokens(cut_off(z, cut), y)),
    "processed_logprobs with top-k": (TOP, lambda z, y, cut: of_tokens(cut_off(z, cut), y)),
    "processed_logprobs with min-p": (Cut(min_p=0.2), lambda z, y, cut: of_tokens(cut_off(z, cut), y)),
    "top-p before the temperature": (
        Cut(temperature=0.7, top_p=0.8),
        lambda z, y, cut: of_tokens(cut_off(z, cut, divides=False) / cut.temperature, y),
    ),
    "top-k only of two cuts": (Cut(top_k=5, top_p=0.8), lambda z, y, cut: of_tokens(cut_off(z, TOP), y)),
    "the temperature twice": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature**2, y)),
    "the inverse temperature": (SAMPLED, lambda z, y, cut: of_tokens(z * cut.temperature, y)),
    "the temperature in bf16": (SAMPLED, lambda z, y, cut: of_tokens(z / float(torch.tensor(0.7).bfloat16()), y)),
    "logprobs divided by the temperature": (SAMPLED, lambda z, y, cut: of_tokens(z, y) / cut.temperature),
    "one token late": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, y).roll(1)),
    "of the next position": (SAMPLED, lambda z, y, cut: of_tokens(z.roll(-1, 0) / cut.temperature, y)),
    "of the likeliest token": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, z.argmax(-1))),
    "sums so far": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, y).cumsum(0)),
    "a mean": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, y).mean().expand(len(y))),
    "to the base of 2": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, y) / math.log(2)),
    "rounded to bf16": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, y).bfloat16().double()),
    "rounded to three digits": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, y).round(decimals=3)),
    "a wrong first one": (SAMPLED, lambda z, y, cut: of_tokens(z / cut.temperature, y) - 1e-3 * torch.eye(len(y))[0]),
    "with a penalty of repetition": (
        SAMPLED,
        lambda z, y, cut: of_tokens(z / cut.temperature - 0.1 * torch.bincount(y, minlength=z.shape[1]), y),
    ),
    "a temperature of its own": (Cut(), lambda z, y, cut: of_tokens(z / 0.95, y)),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", REPORTS)
def test_a_server_that_has_the_weights_and_reports_other_logprobs_of_what_it_samples_fails(
    fault: str, served: Served
) -> None:
    """Its logprobs of a prompt, which are at temperature 1 in every mode, are right."""
    sound, broken = served.server("http://sound:1"), served.server("http://broken:2")
    cut, broken.reports = REPORTS[fault]
    report = served.push(sound, broken, cut=cut)
    assert report.living == ("http://sound:1",) and report.differences["http://broken:2"].largest < 2e-5
    message = report.failed["http://broken:2"]
    assert "has the trainer's weights, but its logprobs are not those at the sampling temperature" in message
    mode = "processed_logprobs" if cut.is_open else "raw_logprobs" if cut.temperature == 1 else ""
    remedy = f"Start vLLM with --logprobs-mode {mode}" if mode else "in no --logprobs-mode: set rl.rollout.top_k=none"
    assert remedy in message


@pytest.mark.full
def test_a_server_that_counts_ids_beyond_the_tokenizers_vocabulary_fails(served: Served) -> None:
    """As raw_logprobs do, also at temperature 1; training gives such ids no probability."""
    sound, broken = served.server("http://sound:1"), served.server("http://broken:2")
    ids = MODEL.vocab_size - 10
    for server in (sound, broken):
        server.samples = lambda logits_V, cut: logits_V[:ids]
    sound.reports = lambda logits_CV, tokens_C, cut: of_tokens(logits_CV[:, :ids], tokens_C)
    assert served.push(sound, broken, cut=Cut(), ids=ids).living == ("http://sound:1",)
    # With a cut, raw_logprobs are right otherwise.
    broken.samples = lambda logits_V, cut: cut_off(logits_V[:ids], cut)
    report = served.push(broken, cut=NUCLEUS, ids=ids)
    assert "the 10 ids that only pad the model's vocabulary of" in report.failed["http://broken:2"]
    assert 'set rl.rollout.top_k=none, top_p=1 and min_p=0, or rl.engine.kind="sglang"' in report.failed[broken.url]


UNSEEN: dict[str, tuple[Cut, Callable[[Tensor, Cut], Tensor]]] = {
    "top-p": (NUCLEUS, lambda logits_V, cut: logits_V),
    "the temperature": (SAMPLED, lambda logits_V, cut: logits_V),
}


@pytest.mark.full
@pytest.mark.parametrize("ignored", UNSEEN)
def test_a_server_that_samples_otherwise_and_reports_right_logprobs_is_not_found(ignored: str, served: Served) -> None:
    """The probe does not see such a server, as docs/weight_updates.md says."""
    server = served.server()
    cut, server.samples = UNSEEN[ignored]
    assert served.push(server, cut=cut).living == ("http://a:1",)


@pytest.mark.full
@pytest.mark.parametrize("cut", [Cut(), NUCLEUS, Cut(temperature=0.1), Cut(temperature=2.0)], ids=str)
def test_a_sound_server_is_accepted_at_every_temperature(cut: Cut, served: Served) -> None:
    assert served.push(served.server(), cut=cut).living == ("http://a:1",)


@pytest.mark.full
def test_in_bf16_rounding_at_a_low_temperature_is_accepted_and_raw_logprobs_are_not(one_rank: Mesh) -> None:
    """Measured over weights and both directions: a sound server 0.67 of the limit at most, a raw one 2.7 at least."""
    served = Served(MODEL, one_rank, servers_precision="bf16")
    randomize(served.chunks, seed=13)  # at temperature 0.3 these are beyond the limit of temperature 1
    for temperature in (0.3, 0.7):
        sound, broken = served.server("http://sound:1"), served.server("http://broken:2")
        broken.reports = lambda logits_CV, tokens_C, cut: of_tokens(logits_CV, tokens_C)
        report = served.push(sound, broken, cut=Cut(temperature=temperature), dtype="bf16")
        assert report.living == ("http://sound:1",), report.failed


@pytest.mark.full
def test_a_tied_output_is_sent_and_the_probe_finds_the_one_that_is_left_old(tied: Served) -> None:
    sound, broken = tied.server("http://sound:1"), tied.server("http://broken:2")
    broken.takes = lambda name: name != "lm_head.weight"
    report = tied.push(sound, broken)
    assert report.living == ("http://sound:1",)
    assert torch.equal(sound.weights["lm_head.weight"], tied.new["model.embed_tokens.weight"])


@pytest.mark.full
@pytest.mark.parametrize("call", ["pause", "load 3", "reset"])
def test_a_server_that_fails_is_left_alone_and_the_others_go_on(call: str, served: Served) -> None:
    sound, broken = served.server("http://sound:1"), served.server("http://broken:2")
    broken.fails_at = call
    report = served.push(broken, sound)
    assert report.living == ("http://sound:1",) and sound.calls == UPDATE
    assert list(report.failed) == ["http://broken:2"] and "status 500" in report.failed["http://broken:2"]
    assert broken.calls == UPDATE[: len(broken.calls)] and broken.calls[-1] == call.split(" 3")[0]
    assert (broken.undone, sound.undone) == (1, 0), "half-filled modules, an open session or a pause would stay"
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


@pytest.mark.full
def test_more_sequences_are_taken_until_all_experts_are_reached(one_rank: Mesh) -> None:
    model = MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"num_experts": 32})})
    chunks = built(model, one_rank, seed=4)
    probe = Probe(chunks, one_rank, model)
    logprobs_NT = probe.reference().logprobs_NT
    assert len(probe.sequences) > 6 and len(logprobs_NT) == len(probe.sequences)
    # All experts have the same logit, so that every token takes the first two.
    for shard in local_shards(chunks):
        if shard.key.endswith("router.weight"):
            shard.data.detach().zero_()
    stuck = Probe(chunks, one_rank, model)
    stuck.reference()
    assert stuck.num_unreached == 4 * 30 and len(stuck.sequences) == 96


def test_a_limit_is_of_the_largest_difference_in_fp32_and_otherwise_of_the_mean_beside_what_rounding_makes() -> None:
    fp32, bf16 = probe_limit(None), probe_limit(0.01)
    assert (fp32.statistic, fp32.limit, bf16.statistic) == ("largest", 2e-4, "mean")
    assert bf16.limit == pytest.approx(0.03) and probe_limit(1.0).limit == 0.1
    assert fp32.holds(ProbeDifference(1.9e-4, 1.0)) and not fp32.holds(ProbeDifference(2.1e-4, 0.0))
    assert bf16.holds(ProbeDifference(0.4, 0.02)) and not bf16.holds(ProbeDifference(0.4, 0.031))
    assert not probe_limit(None, tolerance=1e-6).holds(ProbeDifference(1e-5, 0.0))
    assert probe_limit(0.01, tolerance=0.5).limit == 0.5
    not_finite = difference_of(torch.tensor([[-1.0, -2.0]]), [[-1.0, math.nan]])
    assert not fp32.holds(not_finite) and not bf16.holds(not_finite)


def test_the_expert_whose_tokens_differ_most_is_found_by_its_standard_errors() -> None:
    """1200 tokens of which every 10th has chosen expert 3 in layer 2; the oracle is a loop over tokens."""
    generator = torch.Generator().manual_seed(1)
    experts_NTLK = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(3600)]).view(60, 20, 3, 2)
    experts_NTLK[experts_NTLK == 3] = 0
    experts_NTLK[:, ::10, 2, 0], experts_NTLK[:, :, 1] = 3, -1
    noise_NT = torch.rand(60, 20, generator=generator, dtype=torch.float64) * 0.02 + 0.01
    ours_NT = -torch.ones(60, 20, dtype=torch.float64)
    sound = difference_of(ours_NT, ours_NT - noise_NT, experts_NTLK).expert
    assert sound is not None and not sound.is_apart
    theirs_NT = ours_NT - noise_NT * torch.where((experts_NTLK[:, :, 2] == 3).any(-1), 2.0, 1.0)
    found = difference_of(ours_NT, theirs_NT, experts_NTLK).expert
    assert found is not None and found.is_apart and (found.layer, found.expert) == (2, 3)
    apart = sorted(float(value) for value in (theirs_NT - ours_NT).abs().flatten())
    low, high = (float(torch.tensor(apart, dtype=torch.float64).quantile(q)) for q in (0.25, 0.95))
    logs: tuple[list[float], list[float]] = ([], [])
    for n in range(60):
        for t in range(20):
            log = math.log(min(high, max(low, abs(float(theirs_NT[n, t] + 1)))))
            logs[3 in experts_NTLK[n, t, 2].tolist()].append(log)
    gap = statistics.mean(logs[1]) - statistics.mean(logs[0])
    assert found.ratio == pytest.approx(math.exp(gap))
    error = statistics.stdev([*logs[0], *logs[1]]) * (1 / len(logs[0]) + 1 / len(logs[1])) ** 0.5
    assert found.errors == pytest.approx(gap / error)
    # Too few tokens show nothing, and neither do equal ones.
    assert difference_of(ours_NT[:3], theirs_NT[:3], experts_NTLK[:3]).expert is None
    assert difference_of(ours_NT, ours_NT, experts_NTLK).expert is None


ROUNDED_FAULTS: dict[str, tuple[str, ...]] = {
    "nothing wrong": (),
    "one tensor left old": ("layers.2.mlp.gate.weight",),
    "half an update": ("layers.2.", "layers.3."),
    "an expert missing": ("layers.1.mlp.experts.5.",),
    "an expert of the last layer": ("layers.3.mlp.experts.7.down_proj",),
    "q without k and v": ("k_proj", "v_proj"),
    "a tied head left old": ("lm_head.weight",),
}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_fault_of_a_server_in_bf16_is_found_beside_what_rounding_makes(
    precision: Precision, one_rank: Mesh
) -> None:
    """The trainer is in either precision, with a tied head. The server computes in the other one, so that it is another
    program to a trainer in bf16 too.
    """
    others: Precision = "bf16" if precision == "fp32" else "fp32"
    served = Served(TIED, one_rank, precision=precision, servers_precision=others)
    probe = Probe(served.chunks, served.mesh, TIED, "bf16")
    ours = probe.reference()
    assert ours.limit.statistic == "mean" and probe.num_unreached == 0
    rounding_nats = ours.limit.limit / 3
    for fault, parts in ROUNDED_FAULTS.items():
        is_old = {name: any(part in name for part in parts) for name in served.new}
        weights = {name: (served.old if is_old[name] else served.new)[name] for name in served.new}
        difference = ours.difference(served.logprobs_of(weights, probe.sequences))
        expert = difference.expert
        assert expert is not None
        if fault == "nothing wrong":
            assert ours.limit.holds(difference) and difference.mean < 2 * rounding_nats
            continue
        assert not ours.limit.holds(difference), fault
        if "expert" in fault:
            assert expert.is_apart and f"layers.{expert.layer}.mlp.experts.{expert.expert}." in parts[0]
        else:
            assert not expert.is_apart and difference.mean > 4 * rounding_nats


@pytest.mark.full
def test_a_server_in_bf16_without_an_expert_is_left_out_and_the_expert_is_named(one_rank: Mesh) -> None:
    served = Served(MODEL, one_rank, servers_precision="bf16")
    broken = served.server("http://broken:2")
    broken.takes = lambda name: "layers.3.mlp.experts.7.down_proj" not in name
    report = served.push(broken, dtype="bf16")
    assert report.living == ()
    assert report.differences[broken.url].mean < 0.1
    assert "tokens of expert 7 in layer 3 differ by" in report.failed[broken.url]


def test_the_probe_of_servers_in_fp8_blocks_computes_with_what_these_represent(one_rank: Mesh) -> None:
    """Matrices are cut by edges at 192, 160 and 96; sound servers are within 2e-4, and no others."""
    moe = MODEL.moe.model_copy(update={"ffn_hidden_size": 160})
    model = MODEL.model_copy(update={"hidden_size": 192, "head_dim": 48, "num_layers": 2, "moe": moe})
    fp8 = Served(model, one_rank)
    sent: Tensors = {}
    for bucket in Fp8Stream(fp8.chunks, one_rank, model):
        sent |= bucket.tensors
    meant = dict(fp8.new)
    for name in [name for name in sent if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        values, scales = quantized(fp8.new[weight])
        assert torch.equal(sent[name], scales) and torch.equal(sent[weight].float(), values.float())
        meant[weight] = exact(values, scales, torch.float32)
    rounded = {name for name in meant if meant[name] is not fp8.new[name]}
    assert rounded == {name for name in meant if name.endswith("_proj.weight")}
    value = "model.layers.1.self_attn.v_proj.weight"
    twice = meant[value].clone()
    twice[:, 128:] *= 2
    own = [shard.data.clone() for shard in local_shards(fp8.chunks)]
    probe = Probe(fp8.chunks, one_rank, model, in_fp8=True)
    ours = probe.reference()
    assert all(map(torch.equal, own, [shard.data for shard in local_shards(fp8.chunks)]))
    assert len(probe.sequences) == 96 and ours.limit.statistic == "mean"

    def difference(weights: Tensors) -> ProbeDifference:
        return ours.difference(fp8.logprobs_of(weights, probe.sequences))

    sound = difference(meant)
    assert sound.largest < 2e-5 and ours.limit.holds(sound)
    for fault, weights in {
        "a scale is twice as large": meant | {value: twice},
        "nothing is rounded": fp8.new,
        "a layer is old": meant | {name: one for name, one in fp8.old.items() if ".layers.1." in name},
        "an expert is old": meant | {name: one for name, one in fp8.old.items() if ".1.mlp.experts.5" in name},
    }.items():
        assert not ours.limit.holds(difference(weights)), fault
    # Rounding of inputs hides what a single matrix does; a tolerance of one's own does not.
    alone = difference(meant | {value: fp8.new[value]})
    assert ours.limit.holds(alone) and probe.reference(2e-4).limit.excess(alone) and alone.largest > 10 * 2e-4


def test_a_server_that_rounds_inputs_to_8_bits_too_is_as_far_off_as_the_probe_expects(one_rank: Mesh) -> None:
    model = TINY["qwen3"].model_copy(update={"hidden_size": 256, "head_dim": 64, "num_layers": 2})
    fp8 = Served(model, one_rank)
    with torch.no_grad():
        for shard in local_shards(fp8.chunks):
            shard.data.mul_(0.25 if shard.data.dim() > 1 else 1)
    meant = {
        name: exact(*quantized(one), torch.float32) if name.endswith("_proj.weight") else one
        for name, one in hf_weights(fp8.chunks, one_rank, model).items()
    }
    probe = Probe(fp8.chunks, one_rank, model, in_fp8=True)
    ours = probe.reference()

    def in_8_bits(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parts = [part / (part.abs().amax(-1, keepdim=True) / 448) for part in inputs[0].split(128, -1)]
        scales = [part.abs().amax(-1, keepdim=True) / 448 for part in inputs[0].split(128, -1)]
        return (torch.cat([p.to(torch.float8_e4m3fn).float() * s for p, s in zip(parts, scales, strict=True)], -1),)

    linear = [module for name, module in fp8.modules[0].named_modules() if ".linear_" in name]
    hooks = [module.register_forward_pre_hook(in_8_bits) for module in linear]
    found = ours.difference(fp8.logprobs_of(meant, probe.sequences))
    for hook in hooks:
        hook.remove()
    assert len(hooks) == 4 * model.num_layers and found.mean > 50 * 2e-4
    assert found.mean == pytest.approx(ours.limit.limit / 3, rel=0.05) and ours.limit.limit < 0.1
