"""The served engine on meshes: one rank of a replica asks, and all its ranks have the answers with their own routes."""

from pathlib import Path

import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.engines.base import Sampling
from tests.fake_server import FakeServer, TableAnswers
from tests.generating import ragged_prompts
from tests.hf_models import VOCAB, oracle
from tests.parallel.served import served_completions
from tests.ranks import run_ranks


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
        asked = [
            body for body in server.bodies("/inference/v1/generate") if "seed" in body["sampling_params"]
        ]
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
