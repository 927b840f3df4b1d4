"""A model of transformers, loaded on any mesh, gives the logits of transformers."""

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.families import family_of
from tests.hf_models import TOLERANCE, VOCAB, oracle, random_tokens
from tests.parallel.parity import logits_on
from tests.ranks import run_ranks

MESHES = {
    "tp2": MeshConfig(tp=2),
    "tp2-ep2": MeshConfig(tp=2, ep=2),
    "pp2-vpp2": MeshConfig(pp=2, vpp=2),
    "cp2": MeshConfig(cp=2),
    "tp2-etp2": MeshConfig(tp=2, etp=2),
}


CASES_ON = {
    "tp2": ["qwen3_moe", "deepseek_v3", "qwen2", "seed_oss", "mistral"],
    "tp2-ep2": [
        "qwen3_moe", "deepseek_v3", "qwen2_moe", "gpt_oss", "olmoe", "deepseek_v2", "glm4_moe", "glm4_moe_lite",
        "dots1", "solar_open", "minimax_m2",
    ],
    "pp2-vpp2": [
        "qwen3_moe", "deepseek_v3", "qwen2", "qwen2_moe", "gpt_oss", "olmoe", "deepseek_v2", "glm4_moe",
        "glm4_moe_lite", "dots1", "solar_open", "minimax_m2", "seed_oss", "mistral",
    ],
    "cp2": ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2"],
    "tp2-etp2": ["qwen3_moe", "deepseek_v3", "qwen2_moe", "olmoe", "deepseek_v2", "glm4_moe"],
}  # fmt: skip


@pytest.mark.matrix("tp2-ep2", "pp2-vpp2")
@pytest.mark.parametrize("mesh", MESHES)
def test_logits_equal_those_of_transformers(mesh: str) -> None:
    """All families that the mesh is for, one after the other in one world of ranks."""
    config, tokens_BS, oracles = MESHES[mesh], random_tokens(), {}
    for case in CASES_ON[mesh]:
        heads = {} if family_of(oracle(case).ours).is_latent else {"num_key_value_heads": 2}
        oracles[case] = oracle(case, num_hidden_layers=4, **heads)
    models = {case: (theirs.ours, theirs.tensors) for case, theirs in oracles.items()}
    ranks = run_ranks(logits_on, config.smallest_world, config, models, tokens_BS)
    for case, theirs in oracles.items():
        wanted_BSV = theirs.logits(tokens_BS)
        answers = [torch.cat(rank[case]) for rank in ranks if rank[case]]
        assert len(answers) == config.smallest_world // config.pp
        for logits_BSV in answers:
            torch.testing.assert_close(
                logits_BSV[..., :VOCAB], wanted_BSV, rtol=0, atol=TOLERANCE, msg=lambda m, c=case: f"{c}: {m}"
            )
