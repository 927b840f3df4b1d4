"""A Hugging Face folder with weights, tokenizer and chat template, as people download them."""

from pathlib import Path

import pytest

from tests.conversion import saved
from tests.tokenizer_files import write_tokenizer


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved("qwen3_moe", tmp_path_factory.mktemp("models") / "Tiny-MoE")
    write_tokenizer(folder)
    return folder
