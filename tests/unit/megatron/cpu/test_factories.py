"""torch's factories on a CPU, wrapped so that Megatron's device="cuda" is read as the CPU."""

from pathlib import Path

import pytest
import torch
import transformers

from mcore_rl.megatron.patches.table import PATCHES

FACTORIES = [patch.symbol.partition(":")[2] for patch in PATCHES if patch.wrap == "standins:on_cpu"]


@pytest.mark.parametrize("name", [name for name in FACTORIES if not name.endswith("_like")])
def test_a_device_context_still_decides_where_tensors_are_made(name: str) -> None:
    arguments = {"arange": (3,), "tensor": ([1.0],), "as_tensor": ([1.0],), "full": ((2,), 1.0), "randint": (3, (2,))}
    with torch.device("meta"):
        assert getattr(torch, name)(*arguments.get(name, (2,))).is_meta


@pytest.mark.parametrize("name", FACTORIES)
def test_cuda_is_read_as_the_cpu(name: str) -> None:
    like = torch.ones(2)
    arguments = {"arange": (3,), "tensor": ([1.0],), "as_tensor": ([1.0],), "full": ((2,), 1.0), "randint": (3, (2,))}
    arguments |= {"full_like": (like, 1.0)} | {f"{kind}_like": (like,) for kind in ("empty", "zeros", "ones", "rand")}
    made = getattr(torch, name)(*arguments.get(name, (2,)), device="cuda")
    assert made.device.type == "cpu"


def test_transformers_loads_what_it_saved(tmp_path: Path) -> None:
    """It builds models on the meta device and then makes the rotary tables anew."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
