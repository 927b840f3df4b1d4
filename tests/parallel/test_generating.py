"""The native engine on meshes: completions, and conversations with environments, are those of one rank.

Drawing from slices of the vocabulary on two ranks is drawing from the whole.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.families import family_of
from mcore_rl.megatron.mesh import build_mesh
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.sampling import Cut, Drawn, draw, uniforms
from mcore_rl.rl.types import Completion
from tests.conversing import config_of as conversation_config
from tests.conversing import held_on, problems, write_tokenizer
from tests.generating import completions_on, ragged_prompts
from tests.hf_models import VOCAB, oracle
from tests.parallel.parity import MESHES
from tests.ranks import run_ranks

ROWS, IDS, PADDED = 64, 700, 768
CUTS = [
    Cut(),
    Cut(temperature=0.7, top_k=5),
    Cut(top_p=0.6),
    Cut(temperature=1.2, top_k=40, top_p=0.8, min_p=0.05),
    Cut(temperature=0.0),
]


def logits() -> Tensor:
    logits_BV = torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(0)) * 2
    logits_BV[:, IDS:] = 50.0
    return logits_BV


def drawn_on(tp: int) -> list[Drawn]:
    mesh = build_mesh(MeshConfig(tp=tp))
    slice_Bv = logits().chunk(tp, dim=1)[mesh.tp.rank]
    uniforms_B = uniforms(torch.arange(ROWS), torch.arange(ROWS))
    return [draw(slice_Bv, uniforms_B, cut, mesh.tp, vocab_size=IDS) for cut in CUTS]


@pytest.mark.full
def test_slices_of_the_vocabulary_on_two_ranks_draw_the_same() -> None:
    alone = run_ranks(drawn_on, 1, 1)[0]
    for rank in run_ranks(drawn_on, 2, 2):
        for ours, wanted in zip(rank, alone, strict=True):
            assert ours.tokens_B.tolist() == wanted.tokens_B.tolist()
            torch.testing.assert_close(ours.logprobs_B, wanted.logprobs_B, rtol=0, atol=1e-12)
            torch.testing.assert_close(ours.kept_logprobs_B, wanted.kept_logprobs_B, rtol=0, atol=1e-12)


MESHES_OF = {
    "qwen3_moe": ["tp2", "ep2", "pp2", "tp2-ep2", "tp2-pp2-vpp2", "cp2"],
    "deepseek_v3": ["tp2", "pp2"],
    "glm_moe_dsa": ["tp2-ep2", "pp2", "cp2"],
    "qwen3_next": ["tp2", "pp2", "cp2"],
}

SAMPLINGS = [
    Sampling(max_new_tokens=8, cut=Cut(temperature=0.0), with_routes=True),
    Sampling(max_new_tokens=8, cut=Cut(temperature=0.8), with_routes=True, stop_tokens=frozenset(range(9))),
    Sampling(max_new_tokens=5, cut=Cut(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02)),
]
SMALL = {"slots": 5, "step_tokens": 16}
"""So that rows finish and are replaced, and prompts are read in parts."""


def work_of(case: str, num_layers: int) -> tuple[Any, ...]:
    """The model, its weights, prompts and settings, which are alike on every mesh."""
    heads = {} if family_of(oracle(case).ours).is_latent else {"num_key_value_heads": 2}
    theirs = oracle(case, num_hidden_layers=num_layers, **heads)
    return theirs.ours, theirs.tensors, ragged_prompts(8, VOCAB), SAMPLINGS, SMALL


@functools.cache
def alone_with(case: str, num_layers: int) -> list[list[Completion]]:
    alone: list[list[Completion]]
    ((_, alone),) = run_ranks(completions_on, 1, MeshConfig(), *work_of(case, num_layers))
    assert {completion.finish for completion in alone[1]} == {"stop", "length"}
    return alone


@pytest.mark.matrix("qwen3_moe-tp2-pp2-vpp2")
@pytest.mark.parametrize(("case", "mesh"), [(case, mesh) for case, meshes in MESHES_OF.items() for mesh in meshes])
def test_completions_are_those_of_one_rank(case: str, mesh: str) -> None:
    num_layers = 4 if MESHES[mesh].pp > 1 else 2
    work, alone = work_of(case, num_layers), alone_with(case, num_layers)
    prompts = ragged_prompts(8, VOCAB)
    ranks = run_ranks(completions_on, MESHES[mesh].smallest_world, MESHES[mesh], *work)
    for places, runs in ranks:
        for run, reference in zip(runs, alone, strict=True):
            assert len(run) in (2 * len(prompts), len(prompts) // 2)
            for ours, wanted in zip(run, reference, strict=False):
                assert ours.tokens_T == wanted.tokens_T
                # Gated delta nets amplify rounding.
                within = 3e-4 if case == "qwen3_next" else 2e-5
                assert ours.logprobs_T == pytest.approx(wanted.logprobs_T, abs=within)
                assert (ours.experts_TLK is None) == (wanted.experts_TLK is None)
                if ours.experts_TLK is not None:
                    # A pipeline stage has the routes of its own layers.
                    of_stage_TLK = wanted.experts_TLK[:, places]
                    torch.testing.assert_close(ours.experts_TLK, of_stage_TLK, rtol=0, atol=0)


@pytest.mark.full
def test_replicas_that_share_experts_ask_each_other_every_sixteen_tokens() -> None:
    """Forty tokens and two more steps for the prompts; a replica with fewer completions goes on with the others."""
    model, tensors, prompts, _, _ = work_of("qwen3_moe", 2)
    sampling = Sampling(max_new_tokens=40, cut=Cut(temperature=0.8), stop_tokens=frozenset(range(4)))
    work = (model, tensors, prompts, [sampling], {"slots": 16})
    ((_, (wanted, *_)),) = run_ranks(questions_on, 1, MeshConfig(), *work)
    assert {completion.finish for completion in wanted} == {"stop", "length"}
    for asked, (run, *_) in run_ranks(questions_on, 2, MESHES["ep2"], *work):
        assert asked[-1] == 0 and 40 <= sum(asked) <= 42 and len(asked) <= 5
        assert [one.tokens_T for one in run] == [one.tokens_T for one in wanted[: len(run)]]


def questions_on(*work: Any) -> tuple[list[int], list[list[Completion]]]:
    """On a rank: the numbers of steps that the replicas agreed on, and the completions."""
    asked, ask = list[int](), MegatronEngine._world_max

    def counted(engine: MegatronEngine, number: int, device: torch.device) -> int:
        asked.append(ask(engine, number, device))
        return asked[-1]

    MegatronEngine._world_max = counted  # type: ignore[method-assign]  # the rank's process ends with this function
    return asked, completions_on(*work)[1]


PROBLEMS = problems("1", "2", "refuse", "raise", "")


@functools.cache
def held_alone(folder: Path) -> list[list[Completion]]:
    ((_, groups),) = held(folder, MeshConfig())
    return [list(group.completions) for group in groups]


def held(folder: Path, mesh: MeshConfig):  # type: ignore[no-untyped-def]
    theirs = oracle("qwen3_moe", num_hidden_layers=4, num_key_value_heads=2)
    config = conversation_config(theirs.ours, name="tests.conversing:Faulty", max_turns=4)
    return run_ranks(held_on, mesh.smallest_world, mesh, config, theirs.tensors, folder, PROBLEMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("characters"))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2", "ep2", "cp2", "tp2-pp2-vpp2"])
def test_conversations_are_those_of_one_rank(mesh: str, folder: Path) -> None:
    """All ranks of a model have them; a replica with fewer goes on generating with the others until all have ended."""
    wanted = held_alone(folder)
    assert {len(one.sampled_spans) for completions in wanted for one in completions} >= {1, 2, 3}
    for layers, groups in held(folder, MESHES[mesh]):
        assert len(groups) in (len(PROBLEMS), len(PROBLEMS) // 2)
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
