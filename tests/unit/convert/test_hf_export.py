"""Without a reference an export has a config.json with which transformers opens it and computes the same."""

from pathlib import Path

import pytest
import torch
import transformers

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.convert.megatron.model import disagreements
from mcore_rl.families import FAMILIES, hf_config
from tests.conversion import exported
from tests.hf_models import CASES, oracle, random_tokens
from tests.tiny_models import TINY
from tests.unit.convert.conftest import Converted

AWKWARD = {"vocab_size": 1003}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_that_is_written_reads_back(family: str) -> None:
    tiny = TINY[family]
    again = checked_model_from_hf(hf_config(tiny))
    assert disagreements(again, tiny) == []
    assert (again.mtp_layers, again.max_position) == (tiny.mtp_layers, tiny.max_position)


def test_transformers_opens_exports_without_reference(converted: Converted, tmp_path: Path) -> None:
    """With its own classes: this package registers none. Without this package tests/unit/convert/test_export_text.py
    opens two."""
    tokens_BS = random_tokens(length=16)
    for case in CASES:
        folder = exported(converted(case, **AWKWARD)[1], tmp_path / case)
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            logits_BSV = opened(tokens_BS).logits
        torch.testing.assert_close(
            logits_BSV, oracle(case, **AWKWARD).logits(tokens_BS), rtol=0, atol=1e-6, msg=case
        )
