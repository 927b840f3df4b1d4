"""A model of transformers, imported and loaded on any mesh, gives the logits of transformers."""

from pathlib import Path

import pytest
import torch

from tests.hf_models import TOLERANCE, oracle, random_tokens
from tests.parallel.converted import logits_of_checkpoints
from tests.parallel.parity import MESHES
from tests.parallel.test_converted_checkpoints import CASES, TWO_GROUPS, fits, import_of
from tests.ranks import run_ranks

EVERY = CASES | dict.fromkeys(("dots1", "solar_open", "seed_oss", "mistral"), TWO_GROUPS)
FEW = ("qwen3_moe", "deepseek_v3", "gpt_oss")
"""Grouped and latent attention, and windows with biases of experts."""


@pytest.mark.matrix("few-pp2-vpp2")
@pytest.mark.parametrize("mesh", ["1", "tp2", "tp2-ep2", "pp2-vpp2", "cp2", "tp2-etp2"])
@pytest.mark.parametrize(("cases", "least"), [(FEW, 2), (tuple(EVERY), 7)], ids=["few", "every"])
def test_logits_equal_those_of_transformers(cases: tuple[str, ...], least: int, mesh: str, tmp_path: Path) -> None:
    """All families that the mesh is for, one after the other in one world of ranks."""
    config, tokens_BS = MESHES[mesh], random_tokens()
    models = {case: import_of(case, EVERY[case], tmp_path) for case in cases}
    models = {case: found for case, found in models.items() if fits(found[0], config)}
    assert len(models) >= least
    ranks = run_ranks(logits_of_checkpoints, config.smallest_world, config, models, tokens_BS)
    for case in models:
        logits_BSV = oracle(case, vocab_size=1003, **EVERY[case]).logits(tokens_BS)
        answers = [torch.cat(rank[case]) for rank in ranks if rank[case]]
        assert len(answers) == config.smallest_world // config.pp
        for answer_BSV in answers:
            # Gated delta nets amplify rounding.
            atol = 3e-4 if case == "qwen3_next" else TOLERANCE
            torch.testing.assert_close(answer_BSV[..., :1003], logits_BSV, rtol=0, atol=atol, msg=case)
