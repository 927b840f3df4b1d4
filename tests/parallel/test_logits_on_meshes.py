"""A model of transformers, loaded on any mesh, gives the logits of transformers."""

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.families import family_of
from tests.hf_models import TOLERANCE, VOCAB, oracle, random_tokens
from tests.parallel.logits import logits_on
from tests.ranks import run_ranks

MESHES = {
    "tp2": MeshConfig(tp=2),
    "tp2-ep2": MeshConfig(tp=2, ep=2),
    "pp2-vpp2": MeshConfig(pp=2, vpp=2),
    "cp2": MeshConfig(cp=2),
    "tp2-etp2": MeshConfig(tp=2, etp=2),
}


MESHES_OF = {
    "qwen3_moe": list(MESHES),
    "deepseek_v3": list(MESHES),
    "qwen2": ["tp2", "pp2-vpp2"],
    "qwen2_moe": ["tp2-ep2", "pp2-vpp2", "tp2-etp2"],
    "gpt_oss": ["tp2-ep2", "pp2-vpp2", "cp2"],
    "olmoe": ["tp2-ep2", "pp2-vpp2", "tp2-etp2"],
    "deepseek_v2": ["tp2-ep2", "pp2-vpp2", "tp2-etp2"],
    "glm4_moe": ["tp2-ep2", "pp2-vpp2", "tp2-etp2"],
}


@pytest.mark.parametrize(
    ("case", "mesh"), [(case, mesh) for case, meshes in MESHES_OF.items() for mesh in meshes]
)
def test_logits_equal_those_of_transformers(case: str, mesh: str) -> None:
    heads = {} if family_of(oracle(case).ours).is_latent else {"num_key_value_heads": 2}
    theirs, tokens_BS = oracle(case, num_hidden_layers=4, **heads), random_tokens()
    wanted_BSV, num_ranks = theirs.logits(tokens_BS), MESHES[mesh].smallest_world
    ranks = run_ranks(logits_on, num_ranks, MESHES[mesh], theirs.ours, theirs.tensors, tokens_BS)
    answers = [torch.cat(rows) for rows in ranks if rows]
    assert len(answers) == num_ranks // MESHES[mesh].pp
    for logits_BSV in answers:
        torch.testing.assert_close(logits_BSV[..., :VOCAB], wanted_BSV, rtol=0, atol=TOLERANCE)
