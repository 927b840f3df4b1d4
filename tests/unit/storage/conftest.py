"""A Hugging Face folder with weights, tokenizer and chat template, as people download them."""

import shutil
from pathlib import Path

import pytest

from tests.conversion import saved
from tests.tokenizer_files import write_tokenizer


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved("qwen3_moe", tmp_path_factory.mktemp("models") / "Tiny-MoE")
    write_tokenizer(folder)
    return folder


def in_hub_cache(cache: Path, source: Path) -> Path:
    """Lay a folder out as the hub's cache has it, as the model org/Tiny-MoE: files behind links."""
    model = cache / "models--org--Tiny-MoE"
    snapshot = model / "snapshots/0123abcd"
    for folder in (model / "blobs", model / "refs", snapshot):
        folder.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copy(file, model / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (model / "refs/main").write_text("0123abcd")
    return model
