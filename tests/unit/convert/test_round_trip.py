"""From Hugging Face to Megatron and back, as files: bit for bit, for every family."""

import io
import json
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.storage.archives import HEADER_BYTES
from mcore_rl.storage.checkpoint import check
from tests.conversion import assert_same, bytes_of, differing, exported, imported, read_dist, read_hf, saved, write_hf
from tests.hf_models import CASES, oracle
from tests.hf_weights import to_global
from tests.unit.convert.conftest import Converted

AWKWARD = {"vocab_size": 1003}
"""With 3 groups, heads of 24 and 6 experts, which all cases have."""


@pytest.mark.matrix("qwen3_moe", "deepseek_v3")
@pytest.mark.parametrize("case", CASES)
def test_import_and_export_give_back_every_bit(case: str, converted: Converted, tmp_path: Path) -> None:
    theirs = oracle(case, **AWKWARD)
    source, checkpoint = converted(case, **AWKWARD)
    assert_same(read_dist(checkpoint), to_global(theirs.tensors, theirs.ours))
    assert check(checkpoint).model == theirs.ours.model_dump(mode="json")
    again = exported(checkpoint, tmp_path / "again", reference=source)
    assert_same(read_hf(again), read_hf(source))
    assert differing(source, checkpoint) == []
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (source / name).read_bytes()


FIVE_EXPERTS = {
    "qwen3_moe": {"num_experts": 5},
    "mixtral": {"num_local_experts": 5},
    "gpt_oss": {"num_local_experts": 5},
    "deepseek_v3": {"n_routed_experts": 5, "n_group": 1, "topk_group": 1},
}


@pytest.mark.full
@pytest.mark.parametrize("case", FIVE_EXPERTS)
def test_five_experts_of_a_vocabulary_of_1003(case: str, tmp_path: Path) -> None:
    changes = FIVE_EXPERTS[case] | AWKWARD
    theirs, source = oracle(case, **changes), saved(case, tmp_path / "hf", **changes)
    checkpoint = imported(source, tmp_path / "ckpt", CopySettings(workers=2, task_bytes=30_000))
    assert_same(read_dist(checkpoint), to_global(theirs.tensors, theirs.ours))
    assert_same(read_hf(exported(checkpoint, tmp_path / "again")), read_hf(source))


@pytest.mark.matrix("torch.bfloat16-deepseek_v3")
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_type_stays_bit_for_bit(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(case, tmp_path / "hf", dtype)
    checkpoint = imported(source, tmp_path / "ckpt")
    assert dtype in {tensor.dtype for tensor in read_dist(checkpoint).values()}
    assert_same(read_hf(exported(checkpoint, tmp_path / "again", reference=source)), read_hf(source))


@pytest.mark.full
def test_the_number_of_workers_does_not_change_a_byte(tmp_path: Path) -> None:
    source = saved("deepseek_v3", tmp_path / "hf")
    one, three = (
        imported(source, tmp_path / str(workers), CopySettings(workers=workers, task_bytes=30_000))
        for workers in (1, 3)
    )
    assert bytes_of(one) == bytes_of(three) and len(bytes_of(one)) > 15
    settings = CopySettings(workers=3, task_bytes=30_000, shard_bytes=100_000)
    back = [
        exported(one, tmp_path / f"{n}", CopySettings(workers=n, task_bytes=30_000, shard_bytes=100_000))
        for n in (4, 2)
    ]
    assert bytes_of(back[0]) == bytes_of(back[1]) == bytes_of(exported(three, tmp_path / "c", settings))


@pytest.mark.full
def test_fused_experts_make_the_same_checkpoint_and_are_written_as_the_reference_has_them(tmp_path: Path) -> None:
    theirs = oracle("qwen3_moe")
    fused = write_hf(tmp_path / "fused", theirs.config, dict(theirs.model.state_dict()))
    checkpoint = imported(fused, tmp_path / "ckpt")
    each = saved("qwen3_moe", tmp_path / "hf")
    assert_same(read_dist(checkpoint), read_dist(imported(each, tmp_path / "ckpt2")))
    assert differing(fused, each) == []
    assert_same(read_hf(exported(checkpoint, tmp_path / "a", reference=fused)), read_hf(fused))
    assert_same(read_hf(exported(checkpoint, tmp_path / "b")), read_hf(each))


@pytest.mark.full
def test_a_tied_output_is_written_if_the_reference_repeats_it(tmp_path: Path) -> None:
    theirs = oracle("qwen3")
    head = {"lm_head.weight": theirs.tensors["model.embed_tokens.weight"].clone()}
    repeated = write_hf(tmp_path / "hf", theirs.config, theirs.tensors | head)
    checkpoint = imported(repeated, tmp_path / "ckpt")
    assert "output_layer.weight" not in read_dist(checkpoint)
    assert_same(read_hf(exported(checkpoint, tmp_path / "a", reference=repeated)), read_hf(repeated))
    assert "lm_head.weight" not in read_hf(exported(checkpoint, tmp_path / "b"))


@pytest.mark.full
def test_another_type_rounds_once_and_leaves_the_expert_bias(tmp_path: Path) -> None:
    theirs = oracle("deepseek_v3")
    checkpoint = imported(saved("deepseek_v3", tmp_path / "hf"), tmp_path / "ckpt", dtype="bf16")
    wanted = to_global(theirs.tensors, theirs.ours)
    rounded = {key: t if key.endswith("expert_bias") else t.bfloat16() for key, t in wanted.items()}
    assert_same(read_dist(checkpoint), rounded)
    back = read_hf(exported(checkpoint, tmp_path / "back"))
    assert {name.endswith("correction_bias"): t.dtype for name, t in back.items()} == {
        True: torch.float32,
        False: torch.bfloat16,
    }


@pytest.mark.full
def test_expert_biases_return_in_the_type_of_the_folder_until_training_has_moved_them(tmp_path: Path) -> None:
    theirs = oracle("minimax_m2")
    in_bf16 = {name: tensor.bfloat16() for name, tensor in theirs.tensors.items()}
    source = write_hf(tmp_path / "hf", theirs.config, in_bf16)
    checkpoint = imported(source, tmp_path / "ckpt")
    assert {key for key, t in read_dist(checkpoint).items() if t.dtype == torch.float32} == {
        "decoder.layers.mlp.router.expert_bias"
    }
    assert_same(read_hf(exported(checkpoint, tmp_path / "a")), in_bf16)
    assert_same(read_hf(exported(checkpoint, tmp_path / "b", reference=source)), in_bf16)
    # A bias of 1 that has moved by a step of training has no number in bf16; one layer's in fp32 stays there.
    bias = "model.layers.1.block_sparse_moe.e_score_correction_bias"
    moved = in_bf16 | {bias: in_bf16[bias].float().clamp(1, 2) + 1e-3}
    checkpoint = imported(write_hf(tmp_path / "moved", theirs.config, moved), tmp_path / "ckpt of moved")
    assert_same(read_hf(exported(checkpoint, tmp_path / "c", reference=source)), moved)
    assert_same(read_hf(exported(checkpoint, tmp_path / "d")), moved)


def test_the_manifest_has_the_checksum_of_every_tensor_on_both_sides(tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path / "hf")
    checkpoint = imported(source, tmp_path / "ckpt")
    manifest = json.loads((checkpoint / "manifest.json").read_text())

    def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        return {name: f"{zlib.crc32(tensor.numpy().tobytes()):08x}" for name, tensor in tensors.items()}

    assert {name: entry["crc32"] for name, entry in manifest["tensors"].items()} == checksums(read_dist(checkpoint))
    assert manifest["sources"]["tensors"] == checksums(read_hf(source))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_part_is_a_sound_archive_that_torch_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = imported(saved("deepseek_v3", tmp_path / "hf", dtype), tmp_path / "ckpt")
    whole = read_dist(checkpoint)
    for key, tensor in open_dist(checkpoint).tensors.items():
        for part in tensor.parts:
            file = (checkpoint / part.saved.file).read_bytes()
            data = file[part.saved.start : part.saved.start + part.saved.length]
            loaded = torch.load(io.BytesIO(data), weights_only=True)
            assert torch.equal(loaded, whole[key][tuple(slice(*span) for span in part.where)])
            assert loaded.dtype == whole[key].dtype and loaded.is_contiguous()
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert archive.testzip() is None
                elements = archive.getinfo("archive/data/0")
            extra = int.from_bytes(data[elements.header_offset + 28 : elements.header_offset + 30], "little")
            begin = elements.header_offset + HEADER_BYTES + len("archive/data/0") + extra
            assert begin % 64 == 0
            assert data[begin : begin + elements.file_size] == loaded.view(torch.uint8).numpy().tobytes()
