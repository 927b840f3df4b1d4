"""Sessions of agents on meshes: the requests of the serving ranks become rounds of all ranks."""

from pathlib import Path

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.types import Group
from tests.conversing import chat_of, problems, write_tokenizer
from tests.generating import Tensors, loaded
from tests.hf_models import oracle
from tests.parallel.parity import MESHES
from tests.ranks import run_ranks
from tests.sessions import agent_config, run_sessions

SIX = problems(*"123456")


def sessions_on(mesh_config: MeshConfig, model: ModelConfig, tensors: Tensors, folder: Path) -> list[Group]:
    """On a rank: this replica's sessions; other replicas than the first have fewer."""
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(mesh_config)
    seed_ranks(1)
    config = agent_config(model, "compacting", max_tokens=160)
    chunks = loaded(config.model, tensors, mesh)
    tokenizer, _ = chat_of(config, folder)
    engine = MegatronEngine(chunks, mesh, config.model, tokenizer.decode, config.rl.engine)
    return run_sessions(config, engine, folder, mesh, SIX[: 4 >> mesh.dp_cp.rank], with_routes=mesh_config.pp == 1)


@pytest.mark.matrix("tp2")
@pytest.mark.parametrize("mesh", ["ep2", "tp2", "pp2", "cp2"])
def test_sessions_do_not_depend_on_the_mesh(mesh: str, tmp_path: Path) -> None:
    theirs, folder = oracle("qwen3_moe", num_hidden_layers=4, num_key_value_heads=2), write_tokenizer(tmp_path)
    config = MESHES[mesh]
    (alone,) = run_ranks(sessions_on, 1, MeshConfig(), theirs.ours, theirs.tensors, folder)
    ranks = run_ranks(sessions_on, config.smallest_world, config, theirs.ours, theirs.tensors, folder)
    for rank, groups in enumerate(ranks):
        assert len(groups) == (4 if rank == 0 or mesh in ("tp2", "pp2") else 2)
        for group, other in zip(groups, alone, strict=False):
            assert group.prompt.tokens_T == other.prompt.tokens_T
            for one, wanted in zip(group.completions, other.completions, strict=True):
                assert one.episode.failure is None, one.episode.failure
                assert (one.tokens_T, one.segments) == (wanted.tokens_T, wanted.segments)
                assert len(one.segments) == 1
                assert one.logprobs_T == pytest.approx(wanted.logprobs_T, abs=1e-5)
                if mesh != "pp2":
                    assert torch.equal(one.experts_TLK, wanted.experts_TLK)
