"""The served engine on meshes: one rank of a replica asks, and all its ranks have the answers with their own routes."""

import os
import platform
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.routers import routed_layers
from mcore_rl.model import hf_stream
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import build_model, local_shards
from mcore_rl.model.hf_stream import Bucket, WeightStream
from mcore_rl.planning.memory import memory_by_stage
from mcore_rl.planning.training import training_of
from mcore_rl.rl.engines import weight_push
from mcore_rl.rl.engines.base import Sampling, make_engine, sampling_of
from mcore_rl.rl.engines.probe import Probe, ProbeReference, probe_sequences
from mcore_rl.rl.engines.server_api import server_apis
from mcore_rl.rl.engines.weight_push import AdapterPush, PushReport, ServedAdapters, WeightPush
from mcore_rl.rl.types import Completion, Prompt
from mcore_rl.storage.checksums import crc32_of
from tests.conversion import exported, imported, read_hf, write_hf
from tests.fake_server import Answer, Asked, FakeServer, TableAnswers
from tests.generating import Tensors, loaded, prompt_of, ragged_prompts, spelled
from tests.hf_models import VOCAB, oracle
from tests.parallel.converted import LiveBytes
from tests.ranks import run_ranks
from tests.served_adapters import with_adapter
from tests.served_model import by_token, reported_logprobs
from tests.unit.convert.test_fp8 import FP8, exact, quantized


def served_completions(
    config: RlRunConfig, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[int, tuple[int, ...], list[Completion], str]:
    """This rank's replica, its layers, the completions of its share of the prompts, and the error of a bad prompt that
    the last replica alone has.
    """
    settings = PlatformConfig(layers="torch")
    platform = start(settings)
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = build_model(config.model, mesh, platform, settings)
    engine = make_engine(config, chunks, mesh, spelled)
    engine.update_weights(4)
    replicas = mesh.dp_cp
    own = prompts[replicas.rank :: replicas.size]
    groups = engine.generate(own, sampling, [[7, 8]] * len(own))
    error = ""
    bad = [prompt_of((1, 10_000))] if replicas.rank == replicas.size - 1 else []
    try:
        engine.generate(bad, sampling, [[1]] * len(bad))
    except EngineError as raised:
        error = str(raised)
    engine.close()
    return replicas.rank, routed_layers(chunks), [one for group in groups for one in group.completions], error


def pushed(config: RlRunConfig, tensors: Tensors, message_bytes: int) -> tuple[PushReport, int, ProbeReference]:
    """The outcome of a push of these weights, the most bytes of tensors that this rank had for it at a time, and the
    trainer's side of the probe of servers in bf16.
    """
    hf_stream.MESSAGE_BYTES = message_bytes
    settings = PlatformConfig(layers="torch")
    start(settings)
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = loaded(config.model, tensors, mesh)
    engine = config.rl.engine
    apis = [server_apis(engine, config.model)(url) for url in engine.urls] if mesh.world.rank == 0 else []
    live = LiveBytes(shard.data for shard in local_shards(chunks))

    class Watched(WeightStream):
        def __iter__(self) -> Iterator[Bucket]:
            with live:
                yield from super().__iter__()

    weight_push.WeightStream = Watched
    report = WeightPush(apis, chunks, mesh, config.model, engine, sampling_in(config)).push(7)
    return report, live.most, Probe(chunks, mesh, config.model, "bf16").reference()


def sampling_in(config: RlRunConfig) -> Sampling:
    return sampling_of(config.rl.rollout, (), vocab_size=config.model.vocab_size, with_routes=False)


def adapters_on_a_full_disk(config: RlRunConfig, tensors: Tensors) -> PushReport:
    """On a rank: the outcome of a push of low-rank adapters that do not fit into the folder for them."""
    mesh, chunks = _with_adapters(config, tensors)
    engine = config.rl.engine
    api: Any = SimpleNamespace(url=engine.urls[0], undo_update=lambda: None)
    served = ServedAdapters(Path(engine.transport_dir))
    push = AdapterPush([api], chunks, mesh, config.model, engine, sampling_in(config), lora=config.lora, served=served)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    report = push.push(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return report


def adapters_pushed_twice(
    config: RlRunConfig, tensors: Tensors, sizes: Sequence[float]
) -> list[tuple[PushReport, list[str]]]:
    """On a rank: the outcomes of pushes of low-rank adapters alone, with these sizes of B, and the folders that are
    left after each.
    """
    mesh, chunks = _with_adapters(config, tensors)
    engine = config.rl.engine
    is_first = mesh.world.rank == 0
    apis = [server_apis(engine, config.model)(url) for url in engine.urls] if is_first else []
    served = ServedAdapters(Path(engine.transport_dir)) if is_first else None
    push = AdapterPush(apis, chunks, mesh, config.model, engine, sampling_in(config), lora=config.lora, served=served)
    found = []
    for version, size in enumerate(sizes):
        for shard in local_shards(chunks):
            if shard.key.endswith("adapter.B"):
                generator = torch.Generator().manual_seed(len(shard.key))
                whole = size * torch.randn(shard.global_shape, generator=generator)
                shard.data.detach().copy_(whole[shard.where])
        report = push.push(version)
        found.append((report, [path.name for path in served.path.iterdir()] if served else []))
    return found


def pushed_adapters(config: RlRunConfig, tensors: Tensors) -> PushReport:
    """On a rank: the outcome of a push of these weights with random low-rank adapters."""
    mesh, chunks = _with_adapters(config, tensors)
    for shard in local_shards(chunks):
        if shard.key.endswith("adapter.B"):
            whole = torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(len(shard.key)))
            shard.data.detach().copy_(0.1 * whole[shard.where])
    engine = config.rl.engine
    apis = [server_apis(engine, config.model)(url) for url in engine.urls] if mesh.world.rank == 0 else []
    return WeightPush(apis, chunks, mesh, config.model, engine, sampling_in(config)).push(7)


def _with_adapters(config: RlRunConfig, tensors: Tensors) -> tuple[Mesh, list[nn.Module]]:
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = loaded(config.model, tensors, mesh)
    add_adapters(chunks, config.lora, config.model, seed=1)
    return mesh, chunks


@pytest.mark.full
def test_every_rank_of_a_replica_has_its_completions_with_the_routes_of_its_layers(tmp_path: Path) -> None:
    model = oracle("qwen3_moe", num_hidden_layers=4).ours
    answers = TableAnswers(VOCAB, layers=4, experts=model.moe.num_experts, top_k=model.moe.top_k)
    with FakeServer(answers) as server:
        # The table is no model's: the probe would find that.
        engine = {"kind": "vllm", "urls": (server.url,), "probe_tolerance": 1e9, "transport_dir": str(tmp_path)}
        config = RlRunConfig.model_validate(
            {
                "run_dir": str(tmp_path / "run"),
                "model": model,
                "mesh": MeshConfig(pp=2, dp=2),
                "replay": {"kind": "r3"},
                "rl": {"prompts": {"task": "arithmetic", "max_tokens": 20}, "engine": engine},
            }
        )
        prompts, sampling = ragged_prompts(5, VOCAB), Sampling(max_new_tokens=6, with_routes=True)
        ranks = run_ranks(served_completions, 4, config, prompts, sampling)
        asked = server.rollouts()
    assert len(asked) == 2 * len(prompts), "a completion is asked for once, not by each rank"
    assert sorted((replica, layers) for replica, layers, _, _ in ranks) == [
        (0, (0, 1)),
        (0, (2, 3)),
        (1, (0, 1)),
        (1, (2, 3)),
    ]
    for replica, layers, completions, error in ranks:
        expected = [(prompt, seed) for prompt in prompts[replica::2] for seed in (7, 8)]
        assert len(completions) == len(expected)
        for one, (prompt, seed) in zip(completions, expected, strict=True):
            tokens = tuple((seed * 7919 + t * 104729 + prompt.tokens_T[0]) % VOCAB for t in range(6))
            assert one.tokens_T == tokens and one.policy_version == 4
            experts = answers.experts_of((*prompt.tokens_T, *tokens)[:-1])[:, list(layers)]
            assert one.experts_TLK is not None and torch.equal(one.experts_TLK.long(), torch.from_numpy(experts))
        assert "has the id 10000" in error, "all ranks raise what one replica found"


MESSAGE_BYTES = 1 << 12
"""Most bytes of a message between ranks, which is far less than a layer has."""


LOADING = threading.Lock()
"""`from_pretrained` replaces `tie_weights` of all models while it runs: two at a time would leave it replaced."""


class TransformersAnswers(TableAnswers):
    """Logprobs of texts by transformers, which reads the tensors that updates have brought as it reads a checkpoint."""

    def __init__(self, theirs: nn.Module, folder: Path) -> None:
        super().__init__(VOCAB)
        self.kind, self.folder, self.lock = type(theirs), folder, threading.Lock()
        self.model = theirs.__class__(theirs.config).eval()
        self.tensors: dict[str, Tensor] = {}
        self.files: dict[str, set[str]] = {}
        """Names of the files of each bucket."""
        self.folders: set[Path] = set()

    def load(self, update: Mapping[str, Any]) -> None:
        (folder,) = {Path(file["path"]).parent for file in update["files"]}
        assert folder not in self.folders, "servers take whole modules: all files of a layer come in one call"
        self.folders.add(folder)
        for file in update["files"]:
            path = Path(file["path"])
            assert crc32_of(path) == file.get("crc32", crc32_of(path))
            self.files.setdefault(path.parent.name, set()).add(path.stem)
            self.tensors |= load_file(file["path"])

    def assert_has(self, tensors: Tensors) -> None:
        """Updates have brought all of these tensors, bit for bit, and no others."""
        assert self.tensors.keys() == tensors.keys()
        assert all(torch.equal(self.tensors[name], tensor) for name, tensor in tensors.items())

    def finish(self) -> None:
        self.model.config.save_pretrained(self.folder)
        save_file(self.tensors, self.folder / "model.safetensors", {"format": "pt"})
        with LOADING:
            self.model = self.kind.from_pretrained(self.folder, attn_implementation="eager").eval()

    def adapted(self, folder: str) -> "TransformersAnswers":
        found = TransformersAnswers(self.model, self.folder.parent / Path(folder).name)
        found.tensors = with_adapter(self.tensors, Path(folder))
        found.finish()
        return found

    def complete(self, asked: Asked) -> Answer:
        answer, start = super().complete(asked), len(asked.prompt) - 1
        logits_SV = self._logits((*asked.prompt, *answer.tokens))[start:]
        return replace(answer, logprobs=tuple(reported_logprobs(logits_SV, answer.tokens, asked)))

    def score(self, tokens: Sequence[int], top: int = 0) -> list[dict[int, float]]:
        return by_token(self._logits(tokens).log_softmax(-1), tokens, top)

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        with self.lock, torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0, :-1].double()


@pytest.mark.matrix()
@pytest.mark.parametrize("mesh", [MeshConfig(tp=2, ep=2, pp=2, dp=2)], ids=["tp2-ep2-pp2-dp2"])
def test_a_trainer_that_is_cut_in_every_way_gives_two_servers_its_weights_with_the_memory_of_a_layer(
    mesh: MeshConfig, tmp_path: Path
) -> None:
    """The servers get every tensor, which transformers computes with, and no rank has more than a layer for it."""
    theirs = oracle("qwen3_moe", num_hidden_layers=4, num_key_value_heads=2)
    with ExitStack() as stack:
        answers = [TransformersAnswers(theirs.model, tmp_path / name) for name in "ab"]
        servers = [stack.enter_context(FakeServer(one)) for one in answers]
        engine = {"kind": "vllm", "urls": tuple(server.url for server in servers), "transport_dir": str(tmp_path)}
        config = RlRunConfig.model_validate({"model": theirs.ours, "mesh": mesh, "rl": {"engine": engine}})
        ranks = run_ranks(pushed, mesh.smallest_world, config, theirs.tensors, MESSAGE_BYTES)
    report = ranks[0][0]
    assert mesh.smallest_world == 8 and report.living == engine["urls"] and report.probe < 1e-5
    for one in answers:
        one.assert_has(theirs.tensors)
    layer = sum(one.nbytes for name, one in theirs.tensors.items() if name.startswith("model.layers.0."))
    assert report.largest_bucket_bytes == layer
    assert report.num_bytes > 4 * layer
    # One rank of each stage has what is not of experts, two have experts; the copies of these take turns by layer.
    assert [answers[0].files[f"model.layers.{layer}"] for layer in range(4)] == [
        {"0", "1"},
        {"2", "3"},
        {"4", "5"},
        {"6", "7"},
    ]
    # A rank writes its part of a layer while it gathers the next; messages on their way come on top: one and its copy.
    experts = sum(one.nbytes for name, one in theirs.tensors.items() if name.startswith("model.layers.0.mlp.experts"))
    for rank, (_, found, _) in enumerate(ranks):
        part = layer - experts // 2 if rank % 2 == 0 else experts // 2
        assert part < found <= 2 * part + 2 * MESSAGE_BYTES, rank
    plan = training_of(config.model_copy(update={"platform": PlatformConfig(precision="fp32")}), len(ranks))
    assert [stage.pushed for stage in memory_by_stage(plan)] == [2 * (layer - experts // 2)] * 2
    sequences = torch.tensor(probe_sequences(96, VOCAB))
    with torch.no_grad():
        read = theirs.model(sequences, output_router_logits=True)
    logprobs_NT = read.logits[:, :-1].double().log_softmax(-1).gather(2, sequences[:, 1:, None])[..., 0]
    experts_NTLK = torch.stack(
        [one.view(*sequences.shape, -1)[:, :-1].topk(2).indices for one in read.router_logits], 2
    )
    for _, _, reference in ranks:
        assert reference.experts_NTLK is not None
        assert (reference.logprobs_NT - logprobs_NT).abs().max() < 1e-4
        assert torch.equal(reference.experts_NTLK.sort(-1).values, experts_NTLK.sort(-1).values.int())
        assert reference.limit == ranks[0][2].limit and 1e-3 < reference.limit.limit < 0.1


def streamed_by_one_and_by_all(config: RlRunConfig, tensors: Tensors) -> tuple[Tensors, Tensors, int, bool]:
    """On a rank: the tensors that it gathers where rank 0 gathers all and where every rank does, the bytes that it
    sends for the latter, and whether it owns them as it says.
    """
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = loaded(config.model, tensors, mesh)
    found = []
    sizes: list[int] = []
    functions: Any = hf_stream.dist
    send = functions.send
    for to_rank in (0, None):
        stream = WeightStream(chunks, mesh, config.model, to_rank=to_rank)
        sizes.clear()
        functions.send = lambda data, *args, **named: (sizes.append(data.nbytes), send(data, *args, **named))
        # The plan serves any number of pushes.
        found += [{name: one.clone() for bucket in stream for name, one in bucket.tensors.items()} for _ in "ab"]
        functions.send = send
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])
    return found[1], found[3], sum(sizes) // 2, found[2].keys() == found[3].keys()


@pytest.mark.matrix("qwen3_moe")
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "qwen3"])
def test_many_ranks_gather_the_same_bits_as_one_and_send_no_experts(case: str) -> None:
    theirs = oracle(case, num_hidden_layers=4, **({"num_key_value_heads": 2} if case != "deepseek_v3" else {}))
    mesh = MeshConfig(tp=2, ep=2 if theirs.ours.is_moe else 1, pp=2)
    config = RlRunConfig.model_validate({"model": theirs.ours, "mesh": mesh, "rl": {"engine": {"kind": "native"}}})
    ranks = run_ranks(streamed_by_one_and_by_all, 4, config, theirs.tensors)
    whole, parts = ranks[0][0], [found for _, found, _, _ in ranks]
    assert all(is_same for *_, is_same in ranks) and not any(found for found, *_ in ranks[1:])
    assert sum(map(len, parts)) == len(whole) and {name for found in parts for name in found} == whole.keys()
    for found in parts:
        for name, tensor in found.items():
            assert tensor.dtype == whole[name].dtype and torch.equal(tensor, whole[name]), name
            assert torch.equal(tensor, theirs.tensors.get(name, whole[name])), name
    # The second rank of a stage sends at most its half of what the stage has beside experts, and the first nothing.
    first, second = (
        {name for name in whole if any(name.startswith(f"model.layers.{layer}.") for layer in layers)}
        for layers in ((0, 1), (2, 3))
    )
    outside = whole.keys() - first - second
    for rank, names in ((1, first | outside), (3, second | outside)):
        dense = sum(whole[name].nbytes for name in names if ".mlp.experts." not in name)
        assert ranks[rank - 1][2] == 0 and 0 < ranks[rank][2] <= dense // 2
    if theirs.ours.is_moe:
        assert all(any(".mlp.experts." in name for name in found) for found in parts)


@pytest.mark.full
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "qwen3"])
def test_copies_of_the_model_take_turns_by_layer_so_that_every_rank_gathers(case: str) -> None:
    theirs = oracle(case, num_hidden_layers=4)
    mesh = MeshConfig(ep=2 if theirs.ours.is_moe else 1, dp=4)
    config = RlRunConfig.model_validate({"model": theirs.ours, "mesh": mesh, "rl": {"engine": {"kind": "native"}}})
    ranks = run_ranks(streamed_by_one_and_by_all, 4, config, theirs.tensors)
    whole, parts = ranks[0][0], [found for _, found, _, _ in ranks]
    assert sum(map(len, parts)) == len(whole)
    for rank, found in enumerate(parts):
        assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())
        norms = [name for name in found if name.endswith(".input_layernorm.weight")]
        assert norms == [f"model.layers.{rank}.input_layernorm.weight"]
    if case == "qwen3_moe":
        for rank, found in enumerate(parts):
            layers = {int(name.split(".")[2]) for name in found if ".mlp.experts." in name}
            assert layers == {layer for layer in range(4) if layer % 2 == rank // 2}


def push_from_rank(config: RlRunConfig, tensors: Tensors) -> tuple[list[nn.Module], WeightPush]:
    """On a rank: modules with these weights, and what pushes them to the config's servers."""
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = loaded(config.model, tensors, mesh)
    engine, is_first = config.rl.engine, mesh.world.rank == 0
    apis = [server_apis(engine, config.model)(url) for url in engine.urls] if is_first else []
    return chunks, WeightPush(apis, chunks, mesh, config.model, engine, sampling_in(config))


def pushed_by_a_rank_without_room(config: RlRunConfig, tensors: Tensors) -> tuple[PushReport, PushReport]:
    """On a rank: the outcome of a push in which rank 3 cannot write files, and of the next."""
    _, push = push_from_rank(config, tensors)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    failed = push.push(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return failed, push.push(2)


@pytest.mark.full
def test_a_rank_that_cannot_write_is_known_on_every_rank_and_the_next_push_is_whole(tmp_path: Path) -> None:
    theirs = oracle("qwen3_moe", num_hidden_layers=4, num_key_value_heads=2)
    answers, folder = TransformersAnswers(theirs.model, tmp_path / "served"), tmp_path / "weights"
    folder.mkdir()
    with FakeServer(answers) as server:
        engine = {"kind": "vllm", "urls": (server.url,), "transport_dir": str(folder)}
        mesh = MeshConfig(tp=2, ep=2, pp=2)
        config = RlRunConfig.model_validate({"model": theirs.ours, "mesh": mesh, "rl": {"engine": engine}})
        ranks = run_ranks(pushed_by_a_rank_without_room, 4, config, theirs.tensors)
        paths = server.paths()
    failed, whole = ranks[0]
    assert all(found == [failed, whole] for found in map(list, ranks)), "every rank has the same report"
    assert failed.living == () and "rank 3 cannot write its part of a bucket" in failed.failed[server.url]
    assert paths.count("/collective_rpc") == 1, "the half update is undone once"
    assert paths.count("/finish_weight_update") == 1, "and never ended as if it were whole"
    assert whole.living == (server.url,) and whole.probe < 1e-5
    answers.assert_has(theirs.tensors)
    assert {"gather", "write", "load", "paused"} <= whole.seconds.keys() and list(folder.iterdir()) == []


class SlottedAnswers(TransformersAnswers):
    """A server that gets tensors from memory that the trainer shares with it."""

    def load(self, update: Mapping[str, Any]) -> None:
        self.tensors |= update["tensors"]


def pushed_by_slots(config: RlRunConfig, tensors: Tensors) -> tuple[list[PushReport], int, list[str]]:
    """On a rank: the outcomes of two pushes, the size of its slots, and this process's shared memory after them."""
    _, push = push_from_rank(config, tensors)
    sizes: list[int] = []

    class Watched(weight_push.SlotTransport):
        def close(self) -> None:
            sizes.append(len(self._slot_B))
            super().close()

    weight_push.SlotTransport = Watched
    reports = [push.push(version) for version in (1, 2)]
    assert sizes[0] == sizes[1]
    return reports, sizes[0], [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]


@pytest.mark.matrix("tp2-ep2-pp2")
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(tp=2, ep=2, pp=2)], ids=["one", "tp2-ep2-pp2"])
def test_a_push_by_slots_brings_every_server_all_bits_in_slots_of_a_bucket_that_are_freed(
    mesh: MeshConfig, tmp_path: Path
) -> None:
    """Every rank has a slot for the largest bucket, as a server's worker may run on each rank's device."""
    theirs = oracle("qwen3_moe", num_hidden_layers=4, num_key_value_heads=2)
    with ExitStack() as stack:
        answers = [SlottedAnswers(theirs.model, tmp_path / name) for name in "ab"]
        servers = [stack.enter_context(FakeServer(one)) for one in answers]
        urls = tuple(server.url for server in servers)
        engine = {"kind": "vllm", "urls": urls, "transport": "ipc", "share_gpus": True}
        config = RlRunConfig.model_validate({"model": theirs.ours, "mesh": mesh, "rl": {"engine": engine}})
        ranks = run_ranks(pushed_by_slots, mesh.smallest_world, config, theirs.tensors)
        updates = servers[0].bodies("/update_weights")
    for report in ranks[0][0]:
        assert report.living == urls and report.probe < 1e-5
    for one in answers:
        one.assert_has(theirs.tensors)
    layer = sum(one.nbytes for name, one in theirs.tensors.items() if name.startswith("model.layers.0."))
    assert {size for _, size, _ in ranks} == {layer} and ranks[0][0][0].largest_bucket_bytes == layer
    assert all(left == [] for *_, left in ranks), "no slot is left"
    # The first bucket of each push names the slots, here of one machine; others are in the same ones.
    named = [list(update["update_info"]["source"]) for update in updates]
    assert named == [[platform.node()], *[[]] * 6] * 2
    plan = training_of(config.model_copy(update={"platform": PlatformConfig(precision="fp32")}), len(ranks))
    assert [stage.pushed for stage in memory_by_stage(plan)] == [2 * layer, layer][: mesh.pp or 1]


class DeafAnswers(TransformersAnswers):
    """A server that says it has loaded every update, and computes with the base."""

    def load(self, update: Mapping[str, Any]) -> None:
        del update

    def finish(self) -> None:
        pass


@pytest.mark.full
def test_servers_get_low_rank_adapters_added_to_the_weights_and_one_without_them_is_found_out(tmp_path: Path) -> None:
    theirs = oracle("qwen3_moe", num_hidden_layers=2)
    deaf = DeafAnswers(theirs.model, tmp_path / "deaf")
    deaf.model = theirs.model
    with ExitStack() as stack:
        answers = [TransformersAnswers(theirs.model, tmp_path / "heard"), deaf]
        servers = [stack.enter_context(FakeServer(one)) for one in answers]
        engine = {"kind": "vllm", "urls": tuple(server.url for server in servers), "transport_dir": str(tmp_path)}
        config = RlRunConfig.model_validate(
            {
                "model": theirs.ours,
                "mesh": MeshConfig(ep=2, dp=2),
                "lora": {"rank": 8, "alpha": 16.0},
                "rl": {"engine": engine},
            }
        )
        report = run_ranks(pushed_adapters, 2, config, theirs.tensors)[0]
    assert report.living == (servers[0].url,) and report.probe < 1e-4
    assert "does not have the trainer's weights" in report.failed[servers[1].url]
    assert report.merge_loss is not None and report.merge_loss < 1e-5
    projection = "model.layers.0.self_attn.q_proj.weight"
    assert (answers[0].tensors[projection] - theirs.tensors[projection]).abs().max() > 0.01


class UnboundAnswers(TransformersAnswers):
    """A server that takes adapters, and answers under their names as its base."""

    def adapted(self, folder: str) -> "TransformersAnswers":
        return self


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_load_adapters_under_new_names_and_one_that_ignores_them_is_found_out(
    kind: str, tmp_path: Path
) -> None:
    """New ones add nothing, so that the first push shows the base. Later ones change logprobs by less than the probe's
    limit, and by more.
    """
    theirs = oracle("qwen3_moe", num_hidden_layers=2, num_key_value_heads=2)
    with ExitStack() as stack:
        servers = []
        for name, answers in (("heard", TransformersAnswers), ("unbound", UnboundAnswers)):
            one = answers(theirs.model, tmp_path / name)
            one.tensors = dict(theirs.tensors)
            one.finish()
            servers.append(stack.enter_context(FakeServer(one, kind)))
        engine = {
            "kind": kind,
            "urls": tuple(server.url for server in servers),
            "transport_dir": str(tmp_path),
            "lora": "adapter",
        }
        config = RlRunConfig.model_validate(
            {
                "model": theirs.ours,
                "mesh": MeshConfig(tp=2, ep=2),
                "lora": {"rank": 8, "alpha": 16.0},
                "rl": {"engine": engine},
            }
        )
        ranks = run_ranks(adapters_pushed_twice, 2, config, theirs.tensors, [0.0, 3e-6, 0.1])
        assert not any("update" in path for path in servers[0].paths()), "no weights are sent"
        held = [set(server.adapters) for server in servers]
    (new, _), (small, _), (large, folders) = ranks[0]
    assert [[report for report, _ in rank] for rank in ranks[1:]] == [[new, small, large]]
    heard, unbound = engine["urls"]
    assert new.living == (heard, unbound) and new.probe < 1e-5
    assert small.living == large.living == (heard,) and large.probe < 1e-4
    assert "as its base, to the last digit" in small.failed[unbound]
    assert "has another base, or leaves some of them out" in large.failed[unbound]
    names = [report.adapter for report in (new, small, large)]
    assert len(set(names)) == 3 and folders == [large.adapter] and held[0] == {large.adapter}
    assert large.merge_loss is None and large.num_bytes > 0


def test_adapters_that_do_not_fit_on_the_disk_leave_all_servers_out(tmp_path: Path) -> None:
    """Not the run: a later push may find room."""
    theirs = oracle("qwen3_moe", num_hidden_layers=2, num_key_value_heads=2)
    url = "http://127.0.0.1:1"
    engine = {"kind": "vllm", "urls": (url,), "transport_dir": str(tmp_path), "lora": "adapter"}
    config = RlRunConfig.model_validate({"model": theirs.ours, "lora": {"rank": 8}, "rl": {"engine": engine}})
    (report,) = run_ranks(adapters_on_a_full_disk, 1, config, theirs.tensors)
    assert report.living == () and "the adapters cannot be written" in report.failed[url]


class Fp8Answers(TransformersAnswers):
    """A server that computes with the weights which its 8-bit numbers represent, but for tensors that it leaves out."""

    def __init__(self, theirs: nn.Module, folder: Path, left_out: str) -> None:
        super().__init__(theirs, folder)
        self.left_out, self.received = left_out, dict[str, Tensor]()

    def finish(self) -> None:
        self.received = dict(self.tensors)
        for name in [name for name in self.received if name.endswith("_scale_inv")]:
            weight = name.removesuffix("_scale_inv")
            self.tensors[weight] = exact(self.tensors[weight], self.tensors.pop(name), torch.float32)
        self.tensors = {name: one for name, one in self.tensors.items() if self.left_out not in name}
        super().finish()


def pushed_in_fp8(config: RlRunConfig, tensors: Tensors) -> tuple[PushReport, bool]:
    """On a rank: the outcome of a push of these weights, and whether the trainer has them bit for bit afterwards."""
    chunks, push = push_from_rank(config, tensors)
    before = [shard.data.detach().clone() for shard in local_shards(chunks)]
    report = push.push(7)
    return report, all(map(torch.equal, before, [shard.data.detach() for shard in local_shards(chunks)]))


@pytest.mark.matrix("tp2-ep2-pp2")
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(tp=2, ep=2, pp=2)], ids=["one", "tp2-ep2-pp2"])
def test_a_push_in_fp8_blocks_has_the_bits_of_an_export_and_the_probe_expects_what_they_represent(
    mesh: MeshConfig, tmp_path: Path
) -> None:
    """Two ranks have 72 of the 144 rows and columns of queries: a block is cut; others are cut by the edge at 200."""
    sizes = {"hidden_size": 200, "moe_intermediate_size": 136, "num_hidden_layers": 2, "num_key_value_heads": 2}
    theirs = oracle("qwen3_moe", **sizes)
    plain = write_hf(tmp_path / "plain", theirs.config | {"dtype": "float32"}, theirs.tensors)
    blocks: Tensors = {}
    for name, tensor in theirs.tensors.items():
        # Scales of other weights, of which none fits.
        values, scales = quantized(1.7 * tensor) if name.endswith("_proj.weight") else (tensor, None)
        blocks |= {name: values} if scales is None else {name: values, f"{name}_scale_inv": scales}
    like = write_hf(tmp_path / "like", theirs.config | {"quantization_config": FP8, "dtype": "float32"}, blocks)
    export = read_hf(exported(imported(plain, tmp_path / "ckpt"), tmp_path / "out", reference=like, quantize="fp8"))
    with ExitStack() as stack:
        answers = [Fp8Answers(theirs.model, tmp_path / f"{i}", name) for i, name in enumerate(("none", ".1.self_attn"))]
        urls = tuple(stack.enter_context(FakeServer(one)).url for one in answers)
        engine = {"kind": "vllm", "urls": urls, "weights": "fp8_block", "transport_dir": str(tmp_path)}
        config = RlRunConfig.model_validate({"model": theirs.ours, "mesh": mesh, "rl": {"engine": engine}})
        ranks = run_ranks(pushed_in_fp8, mesh.smallest_world, config, theirs.tensors)
    assert export.keys() == answers[0].received.keys() and len(export) > 2 * 2 * 7
    for name, tensor in export.items():
        received = answers[0].received[name]
        assert received.dtype == tensor.dtype and torch.equal(received.float(), tensor.float()), name
    report = ranks[0][0]
    assert report.living == urls[:1] and report.differences[urls[0]].largest < 2e-5
    assert "does not have the trainer's weights" in report.failed[urls[1]]
    assert report.num_bytes == sum(tensor.nbytes for tensor in export.values())
    assert all(is_same for _, is_same in ranks), "the trainer's weights come back bit for bit"
