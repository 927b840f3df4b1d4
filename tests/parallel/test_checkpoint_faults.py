"""Faults of checkpoints are reported on all ranks, with a remedy, and lose nothing that was saved before.

Files of a run folder that a resume does not need, and that are damaged: kept under another name, and reported.
"""

import json
import multiprocessing
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from mcore_rl.config.load import dump_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.platform import start
from mcore_rl.metrics.attempts_file import read_attempts
from mcore_rl.metrics.jsonl import FILE_NAME
from mcore_rl.model.build import local_shards
from mcore_rl.programs.open_run import open_run
from mcore_rl.storage.checkpoints.write import load_weights, save_weights, weights_state
from mcore_rl.train.loop import SupervisedTrainer
from mcore_rl.train.step import NextTokenHead
from tests.parallel.checkpointing import SMALL, config_of, opened, refusal, run, stop_writers, stopped_writers
from tests.parallel.parity import set_up_plain
from tests.ranks import run_ranks

DAMAGE = {"run.json": b'[{"started": "2026-01-', "config.toml": b"[model\n\xff"}


@pytest.mark.full
def test_a_run_resumes_over_damaged_records_and_keeps_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL, MeshConfig())
    for begin, steps in ((0, 3), (3, 4), (4, 5)):
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
        (tmp_path / "DONE").unlink(missing_ok=True)
        assert run_ranks(resumed_at, 1, config) == [begin]
        for name, content in DAMAGE.items():
            (tmp_path / name).write_bytes(content)
    log = (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    for name, content in DAMAGE.items():
        for aside in (f"damaged_{name}", f"damaged_damaged_{name}"):
            assert (tmp_path / aside).read_bytes() == content
            assert f"{tmp_path / name} was damaged, and is {aside} now" in log
    assert len(list(tmp_path.glob("damaged_*"))) == 4


def resumed_at(config: PretrainConfig) -> int:
    """On a rank: the step at which a start of the run begins; it trains to the last step, and records itself."""
    tokens = torch.arange(16)
    sample = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(16), "position_ids": tokens}
    with open_run(config, start(config.platform)) as run:
        step = run.state.progress.step
        SupervisedTrainer(run, NextTokenHead(), train=[sample] * 160, seq_length=16).run()
    assert [attempt.step for attempt in read_attempts(Path(config.run_dir))] == [step]
    assert (Path(config.run_dir) / "config.toml").read_text(encoding="utf-8") == dump_config(config)
    return step


ONE = MeshConfig()
TP2_EP2 = MeshConfig(tp=2, ep=2)
OTHER = SMALL.model_copy(update={"moe": SMALL.moe.model_copy(update={"num_experts": 4})})


@pytest.mark.full
def test_checkpoints_that_are_deleted_between_saves_are_written_anew(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL, ONE, asynchronous=False)
    assert run_ranks(saved_after_deletions, 1, config) == [[["iter_0000001"], ["iter_0000001"], ["iter_0000002"]]]


def saved_after_deletions(config: PretrainConfig) -> list[list[str]]:
    """On a rank: the checkpoints after each of three saves, of steps 1, 1 and 2, each after a deletion of all."""
    found = []
    with opened(config) as run:
        for step in (1, 1, 2):
            shutil.rmtree(Path(config.run_dir) / "checkpoints")
            run.train(step)
            run.checkpoints.save()
            found.append([path.name for path in (Path(config.run_dir) / "checkpoints").glob("iter_*")])
    return found


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [True, False], ids=["background", "foreground"])
def test_a_full_disk_loses_nothing(asynchronous: bool, tmp_path: Path) -> None:
    """One rank cannot write: all ranks report it, training and older checkpoints are unchanged, later saves work."""
    config = config_of(tmp_path, SMALL, TP2_EP2, asynchronous=asynchronous)
    whole = run(config_of(tmp_path / "whole", SMALL, TP2_EP2), until=4)
    for message, losses, names in run_ranks(trained_on_a_full_disk, 2, config):
        assert message.startswith("step 2 is not saved: rank 1: "), message
        assert "File too large" in message and "GiB are free at" in message
        assert f"The last complete checkpoint is {tmp_path}/checkpoints/iter_0000001. Mend that, " in message
        assert names == ["iter_0000001"]
        assert losses == {step: whole.losses[step] for step in (1, 2, 3)}
    assert run(config, until=4).losses == {4: whole.losses[4]}


def trained_on_a_full_disk(config: PretrainConfig) -> tuple[str, dict[int, float], list[str]]:
    """On a rank: the failed save's message, the losses of the whole run, and the folders after the failure."""
    with opened(config) as run:
        run.train(1, save_at=[1])
        run.checkpoints.finish()
        run.train(2)
        if run.state.mesh.world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as error:
            run.checkpoints.save()
            run.checkpoints.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        names = sorted(path.name for path in run.folder.checkpoints.iterdir() if path.is_dir())
        run.train(3, save_at=[3])
    return str(error.value), run.losses, names


@pytest.mark.full
def test_a_full_disk_under_the_last_files_of_rank_zero_is_reported_by_all(tmp_path: Path) -> None:
    """`.metadata` and the marker: where Megatron's own save would leave the other ranks waiting."""
    messages = run_ranks(finished_on_a_full_disk, 2, config_of(tmp_path, SMALL, TP2_EP2))
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 1 is not saved: finishing ")
    assert "There is no complete checkpoint. Mend that, " in messages[0]


def finished_on_a_full_disk(config: PretrainConfig) -> str:
    """On a rank: the message when the shards could be written and nothing after them."""
    with opened(config) as run:
        run.train(1)
        run.checkpoints.save()
        # A writer that was forked before has the old limit; pipes and sockets have none.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as error:
            run.checkpoints.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(error.value)


def truncated(path: Path) -> str:
    shard = path / "__1_0.distcp"
    with shard.open("rb+") as file:
        file.truncate(1000)
    return "is damaged: its file __1_0.distcp has 1000 bytes"


def without_shard(path: Path) -> str:
    (path / "__0_0.distcp").unlink()
    return "is damaged: its file __0_0.distcp is missing"


def without_marker(path: Path) -> str:
    (path / "checkpoint.json").unlink()
    return "has no checkpoint.json: it is not complete"


def with_half_a_marker(path: Path) -> str:
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text[: len(text) // 2])
    return "has a damaged checkpoint.json"


@pytest.mark.matrix("truncated")
@pytest.mark.parametrize("damage", [truncated, without_shard, without_marker, with_half_a_marker])
def test_a_damaged_checkpoint_is_refused_and_the_last_complete_one_offered(
    damage: Any, saved: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(saved, copy)
    what = damage(copy / "checkpoints/iter_0000002")
    own = config_of(copy, SMALL, ONE)
    given = config_of(tmp_path / "new", SMALL, ONE, load=str(copy / "checkpoints/iter_0000002"))
    for config in (own, given):
        message = run_ranks(refusal, 1, config)[0]
        assert message.startswith(f"{copy}/checkpoints/iter_0000002 {what}")
        assert f"The last complete one is {copy}/checkpoints/iter_0000001" in message
    shutil.move(copy / "checkpoints/iter_0000002", tmp_path / "aside")
    assert list(run(own, until=2).losses) == [2], "the remedy works"


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused_before_it_is_read(saved: Path, tmp_path: Path) -> None:
    for optimizer in (True, False):
        config = config_of(tmp_path, OTHER, TP2_EP2, load=str(saved), load_optimizer=optimizer)
        first, second = run_ranks(refusal, 2, config)
        assert first == second
        assert f"{saved}/checkpoints/iter_0000002 is of another model" in first
        assert "experts.linear_fc1.weight is (2, 8, 64, 64) there, (2, 4, 64, 64) here" in first
        assert "model.moe.num_experts is 8 there, 4 here" in first


def test_missing_and_surplus_layers_are_named(saved: Path, tmp_path: Path) -> None:
    tied = SMALL.model_copy(update={"tied_embeddings": True})
    message = run_ranks(refusal, 1, config_of(tmp_path, tied, ONE, load=str(saved)))[0]
    assert "output_layer.weight (128, 64) is not in this model" in message
    assert "model.tied_embeddings is false there, true here" in message


@pytest.mark.full
@pytest.mark.parametrize("start", ["own", "load", "weights"])
def test_another_model_of_the_same_shapes_is_refused_unless_it_is_accepted(
    start: str, saved: Path, tmp_path: Path
) -> None:
    """A resume of the run itself, another run's whole state, and its weights alone."""
    folder, given = tmp_path / "run", {"load": str(saved)}
    if start == "own":
        shutil.copytree(saved, folder)
        given = {}
    moe = {"top_k": 4, "normalize_top_k": False, "aux_loss_coeff": 0.5}
    rope = SMALL.rope.model_copy(update={"theta": 1e6})
    other = SMALL.model_copy(update={"moe": SMALL.moe.model_copy(update=moe), "norm_eps": 1e-3, "rope": rope})
    options: dict[str, Any] = given | {"load_optimizer": start != "weights"}
    first, second = run_ranks(refusal, 2, config_of(folder, other, TP2_EP2, **options))
    assert first == second
    source = (folder if start == "own" else saved) / "checkpoints/iter_0000002"
    # The auxiliary loss is training's own affair.
    assert first == (
        f"{source} is of a model that computes something else of these weights:\n"
        "- model.norm_eps is 1e-06 there, 0.001 here\n"
        "- model.rope.theta is 10000.0 there, 1000000.0 here\n"
        "- model.moe.top_k is 2 there, 4 here\n"
        "- model.moe.normalize_top_k is true there, false here\n"
        "Set the model as it was, or load another checkpoint, or accept it with checkpoint.allow_changes="
        '["model.norm_eps", "model.rope.theta", "model.moe.top_k", "model.moe.normalize_top_k"]'
    )
    names = ("model.norm_eps", "model.rope", "model.moe.top_k", "model.moe.normalize_top_k")
    message = run_ranks(refusal, 2, config_of(folder, other, TP2_EP2, allow_changes=names[1:], **options))[0]
    assert "there, 0.001 here" in message and "theta" not in message
    accepted = run(config_of(folder, other, TP2_EP2, allow_changes=names, **options), until=3)
    assert accepted.source == source
    if start != "weights":
        assert "not as in the checkpoint: model.moe.top_k is 2 there, 4 here" in accepted.lines


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path / "new", SMALL, ONE, load=str(tmp_path / "other"))
    assert (
        run_ranks(refusal, 1, config)[0]
        == f"{tmp_path}/other is not there. There is no other complete checkpoint in {tmp_path}"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (tmp_path / "other/model.safetensors").write_bytes(b"")
    message = run_ranks(refusal, 1, config)[0]
    assert message.startswith(f"{tmp_path}/other is a Hugging Face folder, and {tmp_path}/imports/other-")
    assert f"has no import of it yet. Make it, on one machine: mcore-rl convert import {tmp_path}/other" in message


def test_checkpoints_of_megatron_itself_are_read_and_ours_by_it(saved: Path, tmp_path: Path) -> None:
    """Weights go both ways through Megatron's own `save` and `load`, which Megatron-LM's tools call."""
    model = config_of(tmp_path, SMALL, ONE)
    theirs, ours, again = run_ranks(exchanged_with_megatron, 1, model, saved / "checkpoints/iter_0000002")[0]
    assert theirs.keys() == ours.keys() and len(theirs) > 12
    for name, weight in theirs.items():
        assert torch.equal(weight, ours[name]) and torch.equal(weight, again[name]), name


def exchanged_with_megatron(config: PretrainConfig, path: Path) -> tuple[dict[str, torch.Tensor], ...]:
    """On a rank: weights that Megatron loaded, the same by us, and by us from what Megatron saved of them."""
    state = set_up_plain(config)
    loaded = dist_checkpointing.load(weights_state(state.chunks, state.mesh), str(path))
    state.chunks[0].module.load_state_dict(loaded["model"])
    theirs = weights_of(state.chunks)
    assert loaded["iteration"] == 2 and loaded["args"].num_experts == 8
    assert (path.parent / "latest_checkpointed_iteration.txt").read_text().strip() == "2"

    release = Path(config.run_dir) / "megatron/release"
    release.mkdir(parents=True)
    (release.parent / "latest_checkpointed_iteration.txt").write_text("release")
    # Megatron's writers are processes, which a daemon, as the ranks of these tests are, may not start.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dist_checkpointing.save(weights_state(state.chunks, state.mesh), str(release))

    scramble(state.chunks)
    load_weights(state.chunks, state.mesh, config.model, path)
    ours = weights_of(state.chunks)
    scramble(state.chunks)
    stored = load_weights(state.chunks, state.mesh, config.model, release.parent)
    assert stored.path == release and stored.marker is None
    again = weights_of(state.chunks)

    (release / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"release is damaged: __0_0.distcp has 5 bytes, \d+ are in use"):
        load_weights(state.chunks, state.mesh, config.model, release.parent)
    return theirs, ours, again


def weights_of(chunks: Any) -> dict[str, torch.Tensor]:
    return {f"{shard.key} {shard.where}": shard.data.detach().clone() for shard in local_shards(chunks)}


def scramble(chunks: Any) -> None:
    with torch.no_grad():
        for shard in local_shards(chunks):
            shard.data.add_(1.0)


def test_weights_saved_alone_are_loaded_on_any_mesh_and_do_not_pass_for_a_run(tmp_path: Path) -> None:
    before = run_ranks(weights_saved, 2, config_of(tmp_path, SMALL, TP2_EP2), tmp_path / "w")
    after = run_ranks(weights_loaded, 1, config_of(tmp_path, SMALL, ONE), tmp_path / "w")
    assert before[0] == pytest.approx(after[0], rel=1e-12)
    message = run_ranks(refusal, 1, config_of(tmp_path / "run", SMALL, ONE, load=str(tmp_path / "w")))[0]
    assert "has weights, but no optimizer state" in message and "checkpoint.load_optimizer=false" in message


def weights_saved(config: PretrainConfig, folder: Path) -> float:
    """On a rank: the sum of squares of all weights, which are saved."""
    state = set_up_plain(config)
    path = save_weights(state.chunks, state.mesh, config.model, folder)
    with pytest.raises(CheckpointError, match="exists"):
        save_weights(state.chunks, state.mesh, config.model, folder)
    assert path == folder / "iter_0000000"
    squares = sum(shard.data.double().pow(2).sum() for shard in local_shards(state.chunks) if shard.is_main)
    torch.distributed.all_reduce(squares)
    return float(squares)


def weights_loaded(config: PretrainConfig, folder: Path) -> float:
    state = set_up_plain(config)
    load_weights(state.chunks, state.mesh, config.model, folder)
    return float(sum(shard.data.double().pow(2).sum() for shard in local_shards(state.chunks)))


@pytest.mark.full
def test_old_checkpoints_go_only_when_a_newer_is_complete(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL, ONE, keep=2)
    seen = run_ranks(names_after_each_step, 1, config)[0]
    assert seen == [["iter_0000001"], ["iter_0000001", "iter_0000002"], ["iter_0000002", "iter_0000003"]]


def names_after_each_step(config: PretrainConfig) -> list[list[str]]:
    seen = []
    with opened(config) as run:
        for step in (1, 2, 3):
            run.train(step, save_at=[step])
            run.checkpoints.finish()
            assert run.checkpoints.poll() == []
            run.checkpoints.save()  # of a state that is saved: does nothing
            seen.append(sorted(path.name for path in run.folder.checkpoints.iterdir() if path.is_dir()))
    assert (run.folder.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    return seen


@pytest.mark.full
def test_a_run_that_lost_its_folder_stops_without_writing(tmp_path: Path) -> None:
    """A node was cut off from the network while the job was started again elsewhere."""
    messages = run_ranks(robbed, 2, config_of(tmp_path, SMALL, TP2_EP2))
    assert len(set(messages)) == 1
    assert "now belongs to job 7 attempt 1, process 1 on elsewhere: this run" in messages[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["iter_0000001"]


def robbed(config: PretrainConfig) -> str:
    """On a rank: the message when another attempt claims the folder while a save is being written."""
    with pytest.raises(CheckpointError) as error, opened(config) as run:
        run.train(1, save_at=[1])
        run.checkpoints.finish()
        run.train(2)
        stop_writers()
        run.checkpoints.save()
        writers = stopped_writers()
        if run.state.mesh.world.rank == 0:
            other = {"job": "7", "number": 1, "host": "elsewhere", "pid": 1, "born": 1}
            (run.folder.path / "writer.json").write_text(json.dumps(other))
        for writer in writers:
            writer.resume()
        run.checkpoints.finish()
    return str(error.value)
