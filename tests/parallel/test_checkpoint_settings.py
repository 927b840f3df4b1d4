"""A checkpoint knows its program and its settings; damaged ones, and steps that are not finite, cost no good ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import TrainingError
from mcore_rl.megatron.schedule import HeadOutput
from mcore_rl.metrics.attempts_file import NUMERICS
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.train.step import NextTokenHead, train_step
from tests.parallel.checkpointing import SMALL, Run, config_of, opened, refusal, run
from tests.parallel.parity import batch
from tests.ranks import run_ranks

ONE = MeshConfig()
TP2_EP2 = MeshConfig(tp=2, ep=2)


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "checkpoints").iterdir() if entry.is_dir())


def flip_the_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.full
def test_a_damaged_newest_checkpoint_is_passed_over_where_the_config_says_so(
    saved_run: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(saved_run[0], copy)
    flip_the_middle(copy / "checkpoints/iter_0000002/__1_0.distcp")
    stopping = config_of(copy, SMALL, TP2_EP2)
    assert "iter_0000002/__1_0.distcp is " in run_ranks(refusal, 2, stopping)[0]
    assert folders(copy) == ["iter_0000001", "iter_0000002"]

    config = config_of(copy, SMALL, TP2_EP2, on_damaged="previous")
    resumed = run(config, until=2)
    assert resumed.source == copy / "checkpoints/iter_0000001"
    assert resumed.losses == {2: saved_run[1][2]}, "bit for bit the step that was lost"
    assert folders(copy) == ["damaged_iter_0000002_0", "iter_0000001"]
    assert (copy / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "1\n"
    (warning,) = (line for line in resumed.lines if line.startswith("warning: "))
    assert warning == (
        "warning: iter_0000002 is damaged: the run resumes from iter_0000001, and does the steps between again. The "
        "damaged one is now damaged_iter_0000002_0; delete it when nobody needs it"
    )
    # The last one left is never passed over: the run would silently begin anew.
    (copy / "checkpoints/iter_0000001/__0_0.distcp").unlink()
    assert "its file __0_0.distcp is missing" in run_ranks(refusal, 2, config)[0]
    assert folders(copy) == ["damaged_iter_0000002_0", "iter_0000001"]


def as_sft(config: PretrainConfig) -> Any:
    return SFTConfig(**{name: getattr(config, name) for name in RunConfig.model_fields})


@pytest.mark.full
def test_of_another_stages_checkpoint_only_the_weights_are_taken(
    saved_run: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    path = saved_run[0] / "checkpoints/iter_0000002"
    fine_tuning = as_sft(config_of(tmp_path / "sft", SMALL, TP2_EP2, load=str(saved_run[0])))
    step, moments, lines = run_ranks(state_at_start, 2, fine_tuning)[0]
    assert (step, moments) == (0, 0.0)
    assert f"weights of {path}, a checkpoint of pretrain; optimizer, schedule, data and steps start anew" in lines
    same = config_of(tmp_path / "more", SMALL, TP2_EP2, load=str(saved_run[0]))
    step, moments, lines = run_ranks(state_at_start, 2, same)[0]
    assert step == 2 and moments > 0
    # One folder, one run of one program.
    other = as_sft(config_of(saved_run[0], SMALL, TP2_EP2))
    assert run_ranks(refusal, 2, other)[0].startswith(f"{path} is of a run of pretrain, and this is sft.")


def state_at_start(config: PretrainConfig) -> tuple[int, float, list[str]]:
    """On a rank: the step from which a run trains, the sum of its second moments, and its lines."""
    with opened(config) as run:
        squares = [
            state["exp_avg_sq"].sum()
            for optimizer in run.state.optimizer.chained_optimizers
            for state in optimizer.optimizer.state.values()
            if "exp_avg_sq" in state
        ]
        return run.state.progress.step, float(sum(squares)), run.lines


@pytest.mark.full
def test_changes_on_a_resume_are_logged_and_those_of_data_and_random_numbers_refused(
    saved_run: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(saved_run[0], copy)
    config = config_of(copy, SMALL, TP2_EP2)
    changed = config.model_copy(
        update={
            "train": config.train.model_copy(update={"seed": 7, "global_batch": 16, "steps": 30}),
            "optim": config.optim.model_copy(update={"lr": 0.02}),
        }
    )
    message = run_ranks(refusal, 2, changed)[0]
    assert "- train.global_batch is 8 there, 16 here\n- train.seed is 1234 there, 7 here\n" in message
    assert "optim.lr" not in message and "train.steps" not in message
    assert 'checkpoint.allow_changes=["train.global_batch", "train.seed"]' in message
    allowed = changed.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"allow_changes": ("train",)})}
    )
    lines = run(allowed, until=2).lines
    for line in (
        "train.seed is 1234 there, 7 here",
        "train.global_batch is 8 there, 16 here",
        "train.steps is 20 there, 30 here",
        "optim.lr is 0.01 there, 0.02 here",
    ):
        assert f"not as in the checkpoint: {line}" in lines
    # A checkpoint of before what a step computes changed goes on when asked to.
    marker = copy / "checkpoints/iter_0000002/checkpoint.json"
    fields = json.loads(marker.read_text())
    earlier = {name: value for name, value in fields.items() if name not in ("crc32", "marker_crc32")}
    marker.write_text(json.dumps(earlier | {"numerics": NUMERICS - 1}))
    difference = f"numerics is {NUMERICS - 1} there, {NUMERICS} here"
    message = run_ranks(refusal, 2, config)[0]
    assert f"- {difference}\n" in message and 'checkpoint.allow_changes=["numerics"]' in message
    accepted = config.checkpoint.model_copy(update={"allow_changes": ("numerics",)})
    lines = run(config.model_copy(update={"checkpoint": accepted}), until=2).lines
    assert f"not as in the checkpoint: {difference}" in lines


class NanHead(NextTokenHead):
    def __call__(self, microbatch: LocalMicrobatch, output: Tensor) -> HeadOutput:
        return replace(super().__call__(microbatch, output * torch.nan))


@pytest.mark.full
def test_no_good_checkpoint_is_deleted_while_steps_are_skipped_and_no_bad_one_saved(tmp_path: Path) -> None:
    seen, message = run_ranks(skipped_and_broken, 1, config_of(tmp_path, SMALL, ONE, keep=1))[0]
    assert seen == [
        ["iter_0000001"],
        ["iter_0000001", "iter_0000002"],
        ["iter_0000001", "iter_0000002", "iter_0000003"],
        ["iter_0000004"],
    ]
    assert message.startswith("step 5 is not saved: 1 of ") and "weights are not finite, such as " in message
    assert f"The last complete checkpoint is {tmp_path}/checkpoints/iter_0000004" in message
    assert folders(tmp_path) == ["iter_0000004"]


def skipped_and_broken(config: PretrainConfig) -> tuple[list[list[str]], str]:
    """On a rank: the checkpoints after a step, two skipped ones and a step; and the error of a broken weight."""
    seen = []
    with opened(config) as run:
        for head in (NextTokenHead(), NanHead(), NanHead(), NextTokenHead()):
            report = train_step(run.state, batch(run.state, 0), head)
            assert report.skipped == isinstance(head, NanHead)
            seen.append(checkpoints_after_save(run))
        next(iter(run.state.chunks[0].parameters())).data.view(-1)[0] = torch.inf
        run.state.progress.step += 1
        with pytest.raises(TrainingError) as error:
            run.checkpoints.save()
        assert sum("older ones stay, as the last step was skipped" in line for line in run.lines) == 2
    return seen, str(error.value)


def checkpoints_after_save(run: Run) -> list[str]:
    run.checkpoints.save()
    run.lines += run.checkpoints.finish()
    return folders(run.folder.path)
