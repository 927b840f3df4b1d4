"""A learnable corpus as .bin/.idx, tiny configs of pretraining and of RL, and the command as a user gives it."""

import json
import string
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from tests.forked import run_command
from tests.tokenizer_files import save_tokenizer

VOCAB_SIZE = 120
Finished = subprocess.CompletedProcess[str]

TINY_MODEL = """
[model]
num_layers = 2
hidden_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
vocab_multiple = 16
moe = {{ num_experts = 4, top_k = 2, ffn_hidden_size = 32 }}
"""
"""The section of the model, but for `vocab_size`, which follows it."""
CONFIG = (
    """
run_dir = "{folder}/run"
[platform]
deterministic = true
layers = "torch"
"""
    + TINY_MODEL
    + """vocab_size = 120
attention_dropout = 0.1
hidden_dropout = 0.1
[data]
train = ["{corpus}/train"]
valid = ["{corpus}/valid"]
seq_length = 32
[mesh]
tp = 2
ep = 2
[optim]
lr = 3e-3
[train]
steps = 12
global_batch = 8
micro_batch = 4
eval_batches = 2
[checkpoint]
interval = 4
"""
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in which each token has four possible successors: log 4 = 1.386 nats a token at best."""
    # Here, as this file is the first that the tests' process imports: Megatron is imported after its patches.
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("corpus")
    generator = torch.Generator().manual_seed(0)
    successors = torch.randint(0, VOCAB_SIZE, (VOCAB_SIZE, 4), generator=generator)
    for name, documents in (("train", 200), ("valid", 40)):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=numpy.uint16)
        for _ in range(documents):
            choices = torch.randint(0, 4, (100,), generator=generator).tolist()
            tokens = [int(torch.randint(0, VOCAB_SIZE, (), generator=generator))]
            for choice in choices:
                tokens.append(int(successors[tokens[-1], choice]))
            builder.add_document(torch.tensor(tokens), [len(tokens)])
        builder.finalize(str(folder / f"{name}.idx"))
    return folder


def write_config(folder: Path, corpus: Path) -> Path:
    path = folder / "pretrain.toml"
    path.write_text(CONFIG.format(folder=folder, corpus=corpus))
    return path


@pytest.fixture
def config_file(tmp_path: Path, corpus: Path) -> Path:
    """A run of twelve steps on two ranks (TP2 x EP2) in `tmp_path/run`."""
    return write_config(tmp_path, corpus)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of that run, done in one go; `pretrain.toml` is beside it. Not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    run_command("pretrain", write_config(folder, corpus)).check_returncode()
    return folder / "run"


@pytest.fixture
def mcore_rl() -> Callable[..., Finished]:
    return run_command


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> training loss, from metrics.jsonl."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["train/loss_nats"] for record in records if "train/loss_nats" in record}


RL_CONFIG = (
    """
run_dir = "{folder}/rl"
[platform]
deterministic = true
layers = "torch"
"""
    + TINY_MODEL
    + """vocab_size = 48
[data]
chat_template = "raw"
tokenizer = {{ kind = "huggingface", path = "{folder}/characters" }}
[mesh]
tp = 2
ep = 2
[optim]
lr = 3e-3
schedule = "constant"
[train]
steps = 16
global_batch = 16
eval_interval = 16
[checkpoint]
interval = 4
[rl.prompts]
task = "reversing"
max_tokens = 12
[rl.rollout]
prompts_per_step = 4
group_size = 8
max_new_tokens = 12
[rl.reward]
parts = ["length"]
length_max_tokens = 2
[rl.loss]
kl_coeff = 1e-3
reference_refresh_rollouts = 3
[rl.update]
max_tokens_per_microbatch = 96
[rl.eval]
num_prompts = 4
[rl.samples]
interval = 5
"""
)


CHARACTERS = ("<end>", *string.digits, *string.ascii_lowercase, "=")
"""Texts of the tokens of its policy."""


def write_rl_config(folder: Path) -> Path:
    """Two ranks (TP2 x EP2) that learn to end early; two updates a rollout, each of two microbatches or more, and a
    reference that is refreshed.
    """
    save_tokenizer(folder / "characters", CHARACTERS, "=", splits_characters=True, eos_token="<end>")
    path = folder / "rl.toml"
    path.write_text(RL_CONFIG.format(folder=folder))
    return path


@pytest.fixture
def rl_file(tmp_path: Path) -> Path:
    """The config of that run in `tmp_path/rl`."""
    return write_rl_config(tmp_path)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """One rank in the test's process, for the models of its servers."""
    start(PlatformConfig())
    mesh = build_mesh(MeshConfig())
    seed_ranks(1)
    yield mesh
    destroy_mesh()
