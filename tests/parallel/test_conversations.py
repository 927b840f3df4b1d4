"""Conversations with environments on meshes: those of one rank."""

import functools
from pathlib import Path

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.rl.types import Completion
from tests.conversing import config_of, held_on, problems, write_tokenizer
from tests.hf_models import oracle
from tests.parallel.parity import MESHES
from tests.ranks import run_ranks

PROMPTS = problems("1", "2", "refuse", "raise", "")


@functools.cache
def alone(folder: Path) -> list[list[Completion]]:
    ((_, groups),) = held(folder, MeshConfig())
    return [list(group.completions) for group in groups]


def held(folder: Path, mesh: MeshConfig):  # type: ignore[no-untyped-def]
    theirs = oracle("qwen3_moe", num_hidden_layers=4, num_key_value_heads=2)
    config = config_of(theirs.ours, name="tests.conversing:Faulty", max_turns=4)
    return run_ranks(held_on, mesh.smallest_world, mesh, config, theirs.tensors, folder, PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("characters"))


@pytest.mark.matrix("tp2-pp2-vpp2")
@pytest.mark.parametrize("mesh", ["tp2", "ep2", "cp2", "tp2-pp2-vpp2"])
def test_conversations_are_those_of_one_rank(mesh: str, folder: Path) -> None:
    """All ranks of a model have them; a replica with fewer goes on generating with the others until all have ended."""
    wanted = alone(folder)
    assert {len(one.sampled_spans) for completions in wanted for one in completions} >= {1, 2, 3}
    for layers, groups in held(folder, MESHES[mesh]):
        assert len(groups) in (len(PROMPTS), len(PROMPTS) // 2)
        for group, completions in zip(groups, wanted, strict=False):
            for ours, one in zip(group.completions, completions, strict=True):
                assert (ours.tokens_T, ours.finish) == (one.tokens_T, one.finish)
                assert ours.logprobs_T == pytest.approx(one.logprobs_T, abs=2e-5)
                assert ours.episode is not None and one.episode is not None
                assert (ours.episode.messages, ours.episode.turns) == (one.episode.messages, one.episode.turns)
                failures = [each.failure and each.failure.text for each in (ours.episode, one.episode)]
                assert failures[0] == failures[1]
                assert ours.experts_TLK is not None and one.experts_TLK is not None
                # A pipeline stage has the routes of its own layers.
                torch.testing.assert_close(ours.experts_TLK, one.experts_TLK[:, layers], rtol=0, atol=0)
