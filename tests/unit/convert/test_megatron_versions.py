"""Checkpoints of older versions of Megatron-Core are read (tests/golden/megatron_core_0.15/write.py wrote one)."""

import math
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from mcore_rl.cli.cli import main
from tests.conversion import assert_same, exported, read_hf

GOLDEN = Path(__file__).parents[2] / "golden/megatron_core_0.15/iter_0000007"
HIDDEN, FFN, VOCAB, WIDTH = 16, 24, 32, 8
"""Its hidden size, that of its MLPs, its vocabulary, and the width of one of its two heads."""


def weight(name: str, *shape: int) -> Tensor:
    """The weight of this name in Megatron's model, as write.py fills it."""
    values = torch.arange(math.prod(shape)) % 251 - zlib.crc32(name.encode()) % 100
    return values.view(shape).float()


def layer(index: int) -> dict[str, Tensor]:
    """The weights of a layer by their names in Hugging Face's Llama."""
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    qkv = weight(f"{ours}.self_attention.linear_qkv.weight", 4 * WIDTH, HIDDEN)
    gate, up = weight(f"{ours}.mlp.linear_fc1.weight", 2 * FFN, HIDDEN).chunk(2)
    return {
        f"{theirs}.input_layernorm.weight": weight(f"{ours}.input_layernorm.weight", HIDDEN),
        f"{theirs}.self_attn.q_proj.weight": qkv[: 2 * WIDTH],
        f"{theirs}.self_attn.k_proj.weight": qkv[2 * WIDTH : 3 * WIDTH],
        f"{theirs}.self_attn.v_proj.weight": qkv[3 * WIDTH :],
        f"{theirs}.self_attn.o_proj.weight": weight(f"{ours}.self_attention.linear_proj.weight", HIDDEN, 2 * WIDTH),
        f"{theirs}.post_attention_layernorm.weight": weight(f"{ours}.pre_mlp_layernorm.weight", HIDDEN),
        f"{theirs}.mlp.gate_proj.weight": gate,
        f"{theirs}.mlp.up_proj.weight": up,
        f"{theirs}.mlp.down_proj.weight": weight(f"{ours}.mlp.linear_fc2.weight", HIDDEN, FFN),
    }


def test_a_checkpoint_of_megatron_core_0_15_is_exported_bit_for_bit(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1, intermediate_size=FFN,
        vocab_size=VOCAB, tie_word_embeddings=False,
    )  # fmt: skip
    (tmp_path / "hf").mkdir()
    config.save_pretrained(tmp_path / "hf")
    wanted = {
        "model.embed_tokens.weight": weight("embedding.word_embeddings.weight", VOCAB, HIDDEN),
        "model.norm.weight": weight("decoder.final_layernorm.weight", HIDDEN),
        "lm_head.weight": weight("output_layer.weight", VOCAB, HIDDEN),
        **layer(0),
        **layer(1),
    }
    assert b"MCoreMetadata" in (GOLDEN / ".metadata").read_bytes()
    assert_same(read_hf(exported(GOLDEN, tmp_path / "out", reference=tmp_path / "hf")), wanted)


def test_check_calls_a_known_version_sound_and_an_unknown_one_not_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(GOLDEN, tmp_path / "iter_0000007"))
    assert main(["check", str(copy)]) == 0
    output = capsys.readouterr().out
    assert "5 files, none damaged" in output and output.count("parts as written (CRC-32 inside)") == 3
    # A class of the same length, so that the pickle is whole.
    metadata = (copy / ".metadata").read_bytes().replace(b"MCoreMetadata", b"MCoreTomorrow")
    (copy / ".metadata").write_bytes(metadata)
    assert main(["check", str(copy)]) == 1
    output = capsys.readouterr().out
    assert "DAMAGED" not in output and "Take another copy" not in output
    assert "NOT UNDERSTOOD: .metadata, so that nothing can be said" in output
    assert "strategies.torch.MCoreTomorrow" in output
    assert output.count("not compared: nothing was recorded") == 2
    (copy / ".metadata").write_bytes(metadata[:-9])
    assert main(["check", str(copy)]) == 1
    assert "DAMAGED: 1 of 5 files: .metadata. Take another copy." in capsys.readouterr().out
