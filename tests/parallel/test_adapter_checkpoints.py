"""Low-rank adapters in checkpoints: resumed bit for bit, moved to other meshes, begun from a base without adapters,
saved without the base's weights.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.cli.cli import main
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import LoraConfig, Target
from mcore_rl.config.run import PretrainConfig
from mcore_rl.convert.check import contents
from mcore_rl.errors import CheckpointError
from mcore_rl.model.layers import adapters
from mcore_rl.storage.checkpoints.write import load_weights
from tests.conversion import adapter_of, assert_same, exported, read_dist, read_hf
from tests.parallel.checkpointing import SMALL, config_of, opened, run
from tests.parallel.parity import MESHES, assembled, owned, set_up_plain
from tests.ranks import run_ranks

TARGETS: dict[str, tuple[Target, ...]] = {
    "all": ("attention", "experts"),
    "attention": ("attention",),
    "experts": ("experts",),
}
MESHES = MESHES | {"empty-stage": MeshConfig(pp=2, pp_layout=(2, 0))}


def lora_config(folder: Path, mesh: str, targets: tuple[Target, ...], **checkpoint: Any) -> PretrainConfig:
    lora = LoraConfig(rank=4, alpha=8.0, targets=targets)
    return config_of(folder, SMALL, MESHES[mesh], **checkpoint).model_copy(update={"lora": lora})


def trained(config: PretrainConfig, until: int, save_at: Sequence[int]) -> dict[str, Any]:
    with opened(config) as opened_run:
        before = owned(opened_run.state)
        opened_run.train(until, save_at)
        return {
            "losses": opened_run.losses,
            "before": before,
            "pieces": owned(opened_run.state),
            "lines": opened_run.lines,
        }


def train(
    config: PretrainConfig, until: int, save_at: Sequence[int] = ()
) -> tuple[dict[int, float], dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Losses by step, the weights at the beginning and at the end, and the lines for the log."""
    ranks = run_ranks(trained, config.mesh.smallest_world, config, until, save_at)
    before, after = (assembled([rank[name] for rank in ranks]) for name in ("before", "pieces"))
    return ranks[0]["losses"], before, after, ranks[0]["lines"]


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2-etp2", "empty-stage", "ep2"])
@pytest.mark.parametrize("targets", TARGETS)
def test_a_resumed_run_is_bit_equal(targets: str, mesh: str, tmp_path: Path) -> None:
    whole, broken = (lora_config(tmp_path / name, mesh, TARGETS[targets]) for name in ("whole", "broken"))
    losses, base, expected, _ = train(whole, 4)
    train(broken, 2, [2])
    resumed, _, found, _ = train(broken, 4)
    assert resumed == {step: losses[step] for step in (3, 4)}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    moved = {name for name, tensor in expected.items() if not torch.equal(base[name], tensor)}
    assert moved == {name for name in expected if ".adapter." in name}


@pytest.mark.full
def test_new_adapters_begin_over_the_weights_of_a_checkpoint_without_any(tmp_path: Path) -> None:
    base = config_of(tmp_path / "base", SMALL, MESHES["ep2"])
    _, _, weights, _ = train(base, 2, [2])
    load = {"load": str(tmp_path / "base"), "load_optimizer": False}
    _, found, after, lines = train(lora_config(tmp_path / "lora", "tp2-etp2", TARGETS["all"], **load), 1)
    assert any("and new adapters; optimizer, schedule, data and steps start anew" in line for line in lines)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
    with pytest.raises(AssertionError, match="load_optimizer=false to start from its weights"):
        run(lora_config(tmp_path / "lora-2", "1", TARGETS["all"], load=str(tmp_path / "base")), 1)


@pytest.mark.full
def test_a_model_without_adapters_or_with_other_ones_refuses_them(tmp_path: Path) -> None:
    config = lora_config(tmp_path / "a", "1", TARGETS["all"])
    run(config, 1, [1])
    load = {"load": str(tmp_path / "a"), "load_optimizer": False}
    plain = config_of(tmp_path / "b", SMALL, MESHES["1"], **load)
    with pytest.raises(AssertionError, match=r'other low-rank adapters:\n(.*\n)*- lora.rank is 4 there, "none" here'):
        run(plain, 1)
    with pytest.raises(AssertionError, match="has low-rank adapters, and this model has none"):
        run_ranks(weights_loaded, 1, plain)
    other = lora_config(tmp_path / "c", "1", TARGETS["all"], **load)
    other = other.model_copy(update={"lora": other.lora.model_copy(update={"alpha": 16.0})})
    with pytest.raises(AssertionError, match=r"other low-rank adapters:\n- lora.alpha is 8.0 there, 16.0 here"):
        run(other, 1)
    begun = config.lora.model_copy(update={"load": "peft"})
    with pytest.raises(AssertionError, match=r"lora\.load=peft would take their place.*Leave lora\.load out"):
        run(lora_config(tmp_path / "d", "1", TARGETS["all"], **load).model_copy(update={"lora": begun}), 1)
    changed = config.model_copy(update={"lora": other.lora})
    with pytest.raises(AssertionError, match="The run cannot go on exactly"):
        run(changed, 2)


def over_base(tmp_path: Path, name: str, mesh: str, **checkpoint: Any) -> PretrainConfig:
    """A run of adapters of all kinds of modules over the weights of another run, which is made once."""
    base = config_of(tmp_path / "base", SMALL, MESHES["1"])
    if not Path(base.run_dir).exists():
        run(base, 1, [1])
    load = {"load": base.run_dir, "load_optimizer": False}
    return lora_config(tmp_path / name, mesh, TARGETS["all"], **load, **checkpoint)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2-etp2", "empty-stage", "ep2"])
def test_a_run_whose_checkpoints_have_adapters_alone_resumes_bit_equal(mesh: str, tmp_path: Path) -> None:
    whole = over_base(tmp_path, "whole", mesh)
    losses, base, expected, _ = train(whole, 4)
    broken = over_base(tmp_path, "broken", mesh, weights="adapters")
    train(broken, 2, [2])
    saved = read_dist(tmp_path / "broken/checkpoints/iter_0000002")
    weights = {key for key in saved if not key.startswith("optimizer.")}
    assert weights == {key for key in expected if ".adapter." in key}
    resumed, _, found, _ = train(broken, 4)
    assert resumed == {step: losses[step] for step in (3, 4)}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(found[name], base[name]) for name in expected if ".adapter." not in name)


@pytest.mark.full
def test_adapters_alone_are_read_and_exported_as_a_checkpoint_of_all_weights(tmp_path: Path) -> None:
    """On other meshes, by a run that adds to them and saves over the same base, and by conversions."""
    _, _, saved, _ = train(over_base(tmp_path, "whole", "tp2-etp2"), 2, [2])
    train(over_base(tmp_path, "alone", "tp2-etp2", weights="adapters"), 2, [2])
    load = {"load": str(tmp_path / "alone"), "weights": "adapters"}
    for mesh in ("1", "ep2"):
        config = lora_config(tmp_path / mesh, mesh, TARGETS["all"], **load)
        losses, found, after, _ = train(config, 3, [3])
        assert found.keys() == saved.keys() and losses.keys() == {3}
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
        assert_same(train(config, 3)[1], after)
    checkpoint = tmp_path / "alone/checkpoints/iter_0000002"
    properties = contents(checkpoint).properties
    assert properties["adapters of"] == f"{tmp_path / 'base/checkpoints/iter_0000001'}, which has the weights"
    assert not any("embedding" in tensor.name for tensor in contents(checkpoint).tensors)
    for name in ("whole", "alone"):
        exported(tmp_path / name, tmp_path / f"{name}-merged", merges=True)
        adapter_of(tmp_path / name, tmp_path / f"{name}-adapter", "each")
    for kind in ("merged", "adapter"):
        assert_same(read_hf(tmp_path / f"alone-{kind}"), read_hf(tmp_path / f"whole-{kind}"))


@pytest.mark.full
def test_an_export_of_adapters_replaces_an_earlier_export(tmp_path: Path) -> None:
    run(lora_config(tmp_path / "run", "1", TARGETS["all"]), 1, [1])
    for more in ([], ["--overwrite"]):
        folders = [str(tmp_path / name) for name in ("run", "adapter")]
        assert main(["convert", "export", *folders, "--adapter", "each", *more]) == 0


@pytest.mark.full
def test_adapters_alone_are_refused_over_another_base_or_none(tmp_path: Path) -> None:
    config = over_base(tmp_path, "run", "1", weights="adapters")
    run(config, 1, [1])
    (tmp_path / "base").rename(tmp_path / "away")
    with pytest.raises(AssertionError, match=r"base is .*/iter_0000001, which is not there. Put it"):
        run(config, 2)
    other = config_of(tmp_path / "base", SMALL, MESHES["1"])
    run(other.model_copy(update={"train": other.train.model_copy(update={"seed": 2})}), 1, [1])
    with pytest.raises(AssertionError, match="that is another checkpoint now, of other files than they were"):
        run(config, 2)
    with pytest.raises(CheckpointError, match="that is another checkpoint now"):
        exported(tmp_path / "run", tmp_path / "merged", merges=True)
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "base").symlink_to(tmp_path / "away")
    assert run(config, 2, [2]).losses.keys() == {2}


@pytest.mark.full
def test_a_damaged_base_leaves_the_checkpoints_of_adapters_in_their_place(tmp_path: Path) -> None:
    """They are whole, and an earlier one has the same base."""
    config = over_base(tmp_path, "run", "1", weights="adapters", on_damaged="previous", keep="all")
    run(config, 2, [1, 2])
    files = (tmp_path / "base/checkpoints/iter_0000001").glob("*.distcp")
    file = max(files, key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    part = slice(len(whole) // 4, 3 * len(whole) // 4)
    for damaged in (whole[:-10], whole[: part.start] + bytes(255 - byte for byte in whole[part]) + whole[part.stop :]):
        file.write_bytes(damaged)
        with pytest.raises(
            AssertionError, match=r"iter_0000002 has low-rank adapters alone, and their base is damaged"
        ):
            run(config, 3)
        assert len(list((tmp_path / "run/checkpoints").glob("iter_*"))) == 2
    file.write_bytes(whole)
    assert run(config, 3).losses.keys() == {3}


@pytest.mark.full
def test_a_run_does_not_begin_to_leave_its_base_out(tmp_path: Path) -> None:
    """Which base its weights are equal to is known at its first start alone; all weights can be saved at any time."""
    config = over_base(tmp_path, "run", "1")
    run(config, 1, [1])
    with pytest.raises(AssertionError, match=r'"adapters", and .*iter_0000001 of this run has all weights'):
        run(over_base(tmp_path, "run", "1", weights="adapters"), 2)
    alone = over_base(tmp_path, "alone", "1", weights="adapters")
    run(alone, 1, [1])
    run(over_base(tmp_path, "alone", "1"), 2, [2])
    assert "embedding.word_embeddings.weight" in read_dist(tmp_path / "alone/checkpoints/iter_0000002")


def weights_loaded(config: PretrainConfig) -> None:
    """On a rank: load the weights of `checkpoint.load` as programs that do not train do."""
    state = set_up_plain(config)
    load_weights(state.chunks, state.mesh, config.model, Path(str(config.checkpoint.load)))


def saved_as_replica(config: PretrainConfig, until: int, save_at: Sequence[int]) -> dict[str, Any]:
    """On a rank: `trained`, with the fault that Megatron's layers take B for a copy on every rank."""
    layer = adapters.AdaptedColumnLinear
    layer.sharded_state_dict = layer.__mro__[1].sharded_state_dict  # type: ignore[method-assign]
    return trained(config, until, save_at)


@pytest.mark.full
def test_a_checkpoint_of_one_part_of_b_fails_the_comparison(tmp_path: Path) -> None:
    config = lora_config(tmp_path / "a", "tp2", TARGETS["attention"])
    _, _, whole, _ = train(config.model_copy(update={"run_dir": str(tmp_path / "b")}), 1)
    ranks = run_ranks(saved_as_replica, 2, config, 1, [1])
    name = "decoder.layers.self_attention.linear_qkv.adapter.B"
    assert assembled([rank["pieces"] for rank in ranks])[name].numel() < whole[name].numel()
