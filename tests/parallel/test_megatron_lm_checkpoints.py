"""Checkpoints as Megatron-LM writes them: by Megatron's `save`, with its arguments, and without a marker."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.enums import AttnBackend

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.importing import plan_relayout
from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.convert.megatron.model import KeyLayout
from mcore_rl.errors import CheckpointError
from mcore_rl.model.build import unwrap
from mcore_rl.storage.checkpoints.write import load_weights, sharding_metadata
from mcore_rl.storage.megatron_lm import model_args
from mcore_rl.train.checkpoint_state import full_state
from tests.conversion import ONE_FILE, assert_same, differing, exported, imported, quiet, read_hf, saved
from tests.hf_models import oracle
from tests.parallel.checkpointing import config_of
from tests.parallel.parity import set_up_plain
from tests.ranks import run_ranks

CASES = {"qwen3_moe": 2, "deepseek_v3": 6, "gpt_oss": 2, "qwen2_moe": 2, "llama": 2}
"""With as many key-value groups, in halves."""


def written_by_megatron(config: PretrainConfig, source: Path, folder: Path, singletons: bool) -> None:
    """On a rank: the weights of `source` and an optimizer, saved as Megatron-LM's `save_checkpoint` saves them."""
    state = set_up_plain(config)
    load_weights(state.chunks, state.mesh, config.model, source)
    state.optimizer.reload_model_params()
    ours = full_state(state)
    metadata = sharding_metadata(state.mesh) | {"singleton_local_shards": singletons}
    args = model_args(config.model)
    args.params_dtype = torch.float32
    args.attention_backend = AttnBackend.auto
    args.tensor_model_parallel_size = 2
    args.iteration = 7
    args.data_path = ["1.0", "corpus"]
    theirs = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": singletons},
        "model": unwrap(state.chunks[0]).sharded_state_dict(metadata=metadata),
    }
    if not singletons:
        theirs["optimizer"] = ours["optimizer"]
        theirs["opt_param_scheduler"] = ours["opt_param_scheduler"]
    # Megatron's writers are processes, which a daemon, as the ranks of these tests are, may not start.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    path = folder / "iter_0000007"
    if state.mesh.world.rank == 0:
        path.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()
    dist_checkpointing.save(theirs, str(path))


def loaded_by_training(config: PretrainConfig, folder: Path) -> int | str:
    """On a rank: the number of weights that a run takes from the folder, or why it takes none."""
    state, allowed = set_up_plain(config), config.checkpoint.allow_changes
    try:
        return len(load_weights(state.chunks, state.mesh, config.model, folder, allowed=allowed).shapes)
    except CheckpointError as error:
        return str(error)


def checkpoint_of_megatron_lm(case: str, tmp_path: Path, singletons: bool) -> tuple[Path, Path, PretrainConfig]:
    """A Hugging Face folder, and the folder of Megatron-LM's run on TP2 x EP2 that has the same weights."""
    changes = {"num_key_value_heads": CASES[case], "num_hidden_layers": 4}
    source = saved(case, tmp_path / "hf", **changes)
    checkpoint = imported(source, tmp_path / "ckpt")
    mesh = MeshConfig(tp=2, ep=1 if case == "llama" else 2)
    config = config_of(tmp_path / "run", oracle(case, **changes).ours, mesh)
    run_ranks(written_by_megatron, 2, config, checkpoint, tmp_path / "lm", singletons)
    return source, tmp_path / "lm", config


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_megatron_lm_is_exported_with_the_family_of_the_reference(case: str, tmp_path: Path) -> None:
    source, theirs, config = checkpoint_of_megatron_lm(case, tmp_path, singletons=False)
    found = open_dist(theirs)
    assert found.marker is None and found.step == 7 and len(found.weights) < len(found.tensors)
    with pytest.raises(CheckpointError, match="does not name its model"):
        exported(theirs, tmp_path / "back")
    assert_same(read_hf(exported(theirs, tmp_path / "back", reference=source)), read_hf(source))
    assert differing(source, theirs) == []
    assert run_ranks(loaded_by_training, 2, config, theirs)[0] == len(found.tensors)

    # The same weights, trained with another base of the wavelengths.
    common = torch.load(found.path / "common.pt", weights_only=False)
    common["args"].rotary_base = 7e5
    torch.save(common, found.path / "common.pt")
    with pytest.raises(CheckpointError, match=r"model\.rope\.theta is .* there, 700000\.0 here"):
        exported(theirs, tmp_path / "other", reference=source)
    said = run_ranks(loaded_by_training, 2, config, theirs)
    assert said[0] == said[1] and "model.rope.theta is 700000.0 there" in str(said[0])
    accepting = config.checkpoint.model_copy(update={"allow_changes": ("model.rope.theta",)})
    config = config.model_copy(update={"checkpoint": accepting})
    assert run_ranks(loaded_by_training, 2, config, theirs)[0] == len(found.tensors)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_singleton_local_shards_are_read(case: str, tmp_path: Path) -> None:
    source, theirs, _ = checkpoint_of_megatron_lm(case, tmp_path, singletons=True)
    assert any(key.endswith("linear_fc1.weight_v") for key in open_dist(theirs).tensors)
    assert_same(read_hf(exported(theirs, tmp_path / "back", reference=source)), read_hf(source))
    assert differing(source, theirs) == []
    with (
        pytest.raises(CheckpointError, match=r"has a tensor an expert \(singleton_local_shards\)\. Export it"),
        quiet() as p,
    ):
        convert(plan_relayout(theirs, tmp_path / "o", KeyLayout("te", "each"), source, ONE_FILE), ONE_FILE, p)
