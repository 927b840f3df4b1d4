"""Without a reference an export has a config.json with which transformers opens it and computes the same."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.convert.megatron.model import disagreements
from mcore_rl.families import FAMILIES, hf_config
from tests.conversion import exported, imported, saved
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


@pytest.mark.full
def test_transformers_opens_exports_without_reference(converted: Converted, tmp_path: Path) -> None:
    """With its own classes: this package registers none. Without this package tests/unit/convert/test_export_text.py
    opens two."""
    tokens_BS = random_tokens(length=16)
    for case in CASES:
        folder = exported(converted(case, **AWKWARD)[1], tmp_path / case)
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            logits_BSV = opened(tokens_BS).logits
        torch.testing.assert_close(logits_BSV, oracle(case, **AWKWARD).logits(tokens_BS), rtol=0, atol=1e-6, msg=case)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_a_model_opens_in_the_type_of_its_weights_whatever_the_reference_has(
    case: str, key: str, converted: Converted, tmp_path: Path
) -> None:
    source, checkpoint = converted(case, **AWKWARD)
    tokens_BS = random_tokens(length=16)
    for written, named in (("fp32", "bfloat16"), ("bf16", "float16")):
        reference = saved(case, tmp_path / f"reference_{written}", **AWKWARD)
        config = {name: value for name, value in oracle(case, **AWKWARD).config.items() if name != "dtype"}
        (reference / "config.json").write_text(json.dumps(config | {key: named}))
        folder = exported(checkpoint, tmp_path / written, reference=reference, dtype=written)
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype="auto"
        ).eval()
        assert opened.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[written]
        if written == "fp32":
            with torch.no_grad():
                logits_BSV = opened(tokens_BS).logits
            torch.testing.assert_close(logits_BSV, oracle(case, **AWKWARD).logits(tokens_BS), rtol=0, atol=1e-6)
        assert json.loads((folder / "config.json").read_text()).keys() == (config | {key: named}).keys()
    assert (exported(checkpoint, tmp_path / "same", reference=source) / "config.json").read_bytes() == (
        source / "config.json"
    ).read_bytes()


def test_nothing_of_a_quantized_reference_says_that_the_weights_are_quantized(tmp_path: Path) -> None:
    reference = saved("llama", tmp_path / "hf")
    checkpoint = imported(reference, tmp_path / "ckpt")
    quantized = {
        key: {"quant_method": "compressed-tensors", "bits": 4}
        for key in ("quantization_config", "compression_config", "quantization")
    }
    (reference / "config.json").write_text(json.dumps(oracle("llama").config | quantized))
    files = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
    for name in files:
        (reference / name).write_text("{}")
    (reference / "notes.json").write_text("{}")
    folder = exported(checkpoint, tmp_path / "out", reference=reference)
    assert json.loads((folder / "config.json").read_text()) == oracle("llama").config
    assert {file.name for file in reference.iterdir()} - {file.name for file in folder.iterdir()} == {
        *files,
        *(file.name for file in reference.glob("model*")),
    }
