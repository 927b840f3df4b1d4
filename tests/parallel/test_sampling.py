"""Drawing from slices of the vocabulary on two ranks is drawing from the whole."""

import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.megatron.mesh import build_mesh
from mcore_rl.rl.sampling import Cut, Drawn, draw, uniforms
from tests.ranks import run_ranks

ROWS, VOCAB, PADDED = 64, 700, 768
CUTS = [
    Cut(),
    Cut(temperature=0.7, top_k=5),
    Cut(top_p=0.6),
    Cut(temperature=1.2, top_k=40, top_p=0.8, min_p=0.05),
    Cut(temperature=0.0),
]


def logits() -> Tensor:
    logits_BV = torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(0)) * 2
    logits_BV[:, VOCAB:] = 50.0
    return logits_BV


def drawn_on(tp: int) -> list[Drawn]:
    """On a rank."""
    mesh = build_mesh(MeshConfig(tp=tp))
    slice_Bv = logits().chunk(tp, dim=1)[mesh.tp.rank]
    uniforms_B = uniforms(torch.arange(ROWS), torch.arange(ROWS))
    return [draw(slice_Bv, uniforms_B, cut, mesh.tp, vocab_size=VOCAB) for cut in CUTS]


def test_slices_of_the_vocabulary_on_two_ranks_draw_the_same() -> None:
    alone = run_ranks(drawn_on, 1, 1)[0]
    for rank in run_ranks(drawn_on, 2, 2):
        for ours, wanted in zip(rank, alone, strict=True):
            assert ours.tokens_B.tolist() == wanted.tokens_B.tolist()
            torch.testing.assert_close(ours.logprobs_B, wanted.logprobs_B, rtol=0, atol=1e-12)
            torch.testing.assert_close(ours.kept_logprobs_B, wanted.kept_logprobs_B, rtol=0, atol=1e-12)
