"""Without a reference an export has a config.json with which transformers opens it and computes the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.convert.megatron.model import disagreements
from mcore_rl.families import FAMILIES, hf_config
from tests.conversion import exported
from tests.hf_models import CASES, Tensors, oracle, random_tokens
from tests.tiny_models import TINY
from tests.unit.convert.conftest import Converted

AWKWARD = {"vocab_size": 1003}
OPEN = """
import sys, torch
from transformers import AutoModelForCausalLM
from tests.tiny_models import TINY
tokens_BS, logits = torch.load(sys.argv[1]), {}
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits[folder] = model(tokens_BS).logits
torch.save(logits, sys.argv[1])
"""


def opened(folders: list[Path], file: Path) -> Tensors:
    """Return logits of models opened by a program that imports nothing of this package."""
    torch.save(random_tokens(length=16), file)
    subprocess.run([sys.executable, "-c", OPEN, file, *folders], check=True, capture_output=True)
    logits: Tensors = torch.load(file)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_that_is_written_reads_back(family: str) -> None:
    tiny = TINY[family]
    again = checked_model_from_hf(hf_config(tiny))
    assert disagreements(again, tiny) == []
    assert (again.mtp_layers, again.max_position) == (tiny.mtp_layers, tiny.max_position)


def test_transformers_opens_exports_without_reference(converted: Converted, tmp_path: Path) -> None:
    folders = {case: exported(converted(case, **AWKWARD)[1], tmp_path / case) for case in CASES}
    logits = opened(list(folders.values()), tmp_path / "logits")
    for case, folder in folders.items():
        wanted_BSV = oracle(case, **AWKWARD).logits(random_tokens(length=16))
        torch.testing.assert_close(logits[str(folder)], wanted_BSV, rtol=0, atol=1e-6, msg=case)
