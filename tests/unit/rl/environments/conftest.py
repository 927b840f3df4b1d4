"""One rank in the test's own process, with an engine."""

from pathlib import Path

import pytest
from torch import nn

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.native.engine import MegatronEngine
from tests.conversing import chat_of, config_of, write_tokenizer
from tests.generating import loaded
from tests.hf_models import Oracle, oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def theirs() -> Oracle:
    return oracle("qwen3_moe")


@pytest.fixture(scope="module")
def chunks(theirs: Oracle, one_rank: Mesh) -> list[nn.Module]:
    return loaded(theirs.ours, theirs.tensors, one_rank)


@pytest.fixture(scope="module")
def engine(theirs: Oracle, chunks: list[nn.Module], one_rank: Mesh, folder: Path) -> MegatronEngine:
    config = config_of(theirs.ours)
    tokenizer, _ = chat_of(config, folder)
    return MegatronEngine(chunks, one_rank, theirs.ours, tokenizer.decode, config.rl.engine)
