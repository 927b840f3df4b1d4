"""The served engine on meshes: one rank of a replica asks, and all its ranks have the answers with their own routes."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.probe import probe_sequences
from tests.fake_server import Answer, Asked, FakeServer, TableAnswers
from tests.generating import ragged_prompts
from tests.hf_models import VOCAB, oracle
from tests.parallel.served import (
    adapters_on_a_full_disk,
    adapters_pushed_twice,
    pushed,
    pushed_adapters,
    served_completions,
)
from tests.ranks import run_ranks
from tests.served_adapters import with_adapter
from tests.served_model import reported_logprobs


def test_every_rank_of_a_replica_has_its_completions_with_the_routes_of_its_layers(tmp_path: Path) -> None:
    model = oracle("qwen3_moe", num_hidden_layers=4).ours
    answers = TableAnswers(VOCAB, layers=4, experts=model.moe.num_experts, top_k=model.moe.top_k)
    with FakeServer(answers) as server:
        # The table is no model's: the probe would find that.
        engine = {
            "kind": "vllm",
            "urls": (server.url,),
            "probe_tolerance": 1e9,
            "transport_dir": str(tmp_path),
        }
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
            assert one.experts_TLK is not None and torch.equal(
                one.experts_TLK.long(), torch.from_numpy(experts)
            )
        assert "has the id 10000" in error, "all ranks raise what one replica found"


MESSAGE_BYTES = 1 << 12
"""Most bytes of a message between ranks, which is far less than a layer has."""


class TransformersAnswers(TableAnswers):
    """Logprobs of texts by transformers, which reads the tensors that updates have brought as it reads a checkpoint."""

    def __init__(self, theirs: nn.Module, folder: Path) -> None:
        super().__init__(VOCAB)
        self.kind, self.folder, self.lock = type(theirs), folder, threading.Lock()
        self.model = theirs.__class__(theirs.config).eval()
        self.tensors: dict[str, Tensor] = {}

    def load(self, update: Mapping[str, Any]) -> None:
        self.tensors |= load_file(update["path"])

    def finish(self) -> None:
        self.model.config.save_pretrained(self.folder)
        save_file(self.tensors, self.folder / "model.safetensors", {"format": "pt"})
        self.model = self.kind.from_pretrained(self.folder, attn_implementation="eager").eval()

    def adapted(self, folder: str) -> "TransformersAnswers":
        found = TransformersAnswers(self.model, self.folder.parent / Path(folder).name)
        found.tensors = with_adapter(self.tensors, Path(folder))
        found.finish()
        return found

    def complete(self, asked: Asked) -> Answer:
        """The table's tokens."""
        answer, start = super().complete(asked), len(asked.prompt) - 1
        logits_SV = self._logits((*asked.prompt, *answer.tokens))[start:]
        return replace(answer, logprobs=tuple(reported_logprobs(logits_SV, answer.tokens, asked)))

    def score(self, tokens: Sequence[int]) -> list[float]:
        logprobs_SV = self._logits(tokens).log_softmax(-1)
        return logprobs_SV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

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
        engine = {
            "kind": "vllm",
            "urls": tuple(server.url for server in servers),
            "transport_dir": str(tmp_path),
        }
        config = RlRunConfig.model_validate({"model": theirs.ours, "mesh": mesh, "rl": {"engine": engine}})
        ranks = run_ranks(pushed, mesh.smallest_world, config, theirs.tensors, MESSAGE_BYTES)
    report = ranks[0][0]
    assert mesh.smallest_world == 8 and report.living == engine["urls"] and report.probe < 1e-5
    for one in answers:
        assert one.tensors.keys() == theirs.tensors.keys()
        assert all(torch.equal(one.tensors[name], tensor) for name, tensor in theirs.tensors.items())
    layer = sum(one.nbytes for name, one in theirs.tensors.items() if name.startswith("model.layers.0."))
    assert report.largest_bucket_bytes == layer
    assert report.num_bytes > 4 * layer
    # Messages on their way come on top: one and its copy.
    assert ranks[0][1] <= layer + 2 * MESSAGE_BYTES
    assert max(most for _, most, _ in ranks[1:]) <= 2 * MESSAGE_BYTES
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


class DeafAnswers(TransformersAnswers):
    """A server that says it has loaded every update, and computes with the base."""

    def load(self, update: Mapping[str, Any]) -> None:
        del update

    def finish(self) -> None:
        pass


def test_servers_get_low_rank_adapters_added_to_the_weights_and_one_without_them_is_found_out(
    tmp_path: Path,
) -> None:
    theirs = oracle("qwen3_moe", num_hidden_layers=2)
    deaf = DeafAnswers(theirs.model, tmp_path / "deaf")
    deaf.model = theirs.model
    with ExitStack() as stack:
        answers = [TransformersAnswers(theirs.model, tmp_path / "heard"), deaf]
        servers = [stack.enter_context(FakeServer(one)) for one in answers]
        engine = {
            "kind": "vllm",
            "urls": tuple(server.url for server in servers),
            "transport_dir": str(tmp_path),
        }
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
