"""The parts of an imported checkpoint are what `torch.save` writes: whole zip files, aligned, loaded by torch."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.storage.foreign import HEADER_BYTES
from tests.conversion import imported, read_dist, saved


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
