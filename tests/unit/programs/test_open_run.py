"""A start in the folder of a finished run, and what a resume does with the layers that a run has recorded."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.load import dump_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import CheckpointConfig, PlatformConfig, PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig, SFTDataConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform, decided, start
from mcore_rl.metrics.attempts import this_run_attempt
from mcore_rl.programs.open_run import changes_since_done, keep_layers, refuse_other_run
from mcore_rl.storage.checkpoint import path_of_step
from mcore_rl.train.run_folder import RunFolder
from tests.emulated_machine import emulated
from tests.finished import finish


def refuse(config: RunConfig) -> None:
    refuse_other_run(config.run_dir, changes_since_done(config), config.checkpoint.allow_changes)


def test_the_same_run_is_done_on_whatever_mesh_and_an_unknown_one_too(tmp_path: Path) -> None:
    done = finish(SFTConfig(run_dir=str(tmp_path)))
    refuse(done)
    other_mesh = done.model_copy(update={"mesh": MeshConfig(tp=2), "platform": PlatformConfig(layers="torch")})
    refuse(other_mesh)
    assert [change.key for change in changes_since_done(other_mesh)] == ["platform.layers", "mesh.tp"]
    patient = done.train.model_copy(update={"hang_start_s": 7.0, "hang_save_s": 7.0, "hang_s": 7.0})
    refuse(done.model_copy(update={"train": patient}))
    refuse(done.model_copy(update={"run_dir": str(tmp_path / "without_checkpoints")}))


def test_a_finished_run_is_not_taken_for_one_of_more_steps_or_another_objective(tmp_path: Path) -> None:
    done = finish(RlRunConfig(run_dir=str(tmp_path)))
    steps = done.train.steps
    near_reference = done.rl.model_copy(update={"loss": done.rl.loss.model_copy(update={"kl_coeff": 0.25})})
    faster = {"optim": OptimConfig(lr=7e-5)}
    longer = {"train": done.train.model_copy(update={"steps": steps + 1})}
    shorter = {"train": done.train.model_copy(update={"steps": steps - 1})}
    for update, key, is_longer in (
        ({"rl": near_reference}, "rl.loss.kl_coeff", False),
        (faster, "optim.lr", False),
        (longer, "train.steps", True),
        (shorter, "train.steps", False),
    ):
        other = done.model_copy(update=update)
        with pytest.raises(ConfigError, match=rf"finished run with other settings:\n- {key} is .* there, ") as raised:
            refuse(other)
        assert (f"Delete {tmp_path}/DONE to train on to its train.steps" in str(raised.value)) == is_longer
        refuse(other.model_copy(update={"checkpoint": CheckpointConfig(allow_changes=(key,))}))


@pytest.mark.parametrize("cls", [RlRunConfig, PretrainConfig])
def test_a_finished_run_of_another_program_is_refused(tmp_path: Path, cls: type[RunConfig]) -> None:
    finish(SFTConfig(run_dir=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"finished run of sft, and this is .* Choose another run_dir"):
        refuse(cls(run_dir=str(tmp_path)))


def test_a_finished_run_of_another_model_or_tokenizer_is_refused_unless_allowed(tmp_path: Path) -> None:
    done = finish(SFTConfig(run_dir=str(tmp_path)))
    tokenizer = TokenizerConfig(kind="huggingface", path="other")
    other = done.model_copy(update={"model": ModelConfig(num_layers=3), "data": SFTDataConfig(tokenizer=tokenizer)})
    with pytest.raises(ConfigError) as raised:
        refuse(other)
    for said in ("model.num_layers is 4 there, 3 here", "data.tokenizer.path", "checkpoint.allow_changes="):
        assert said in str(raised.value)
    allowed = CheckpointConfig(allow_changes=("model.num_layers", "data"))
    refuse(other.model_copy(update={"checkpoint": allowed}))


@pytest.mark.parametrize(("began", "now"), [("bf16", "bf16"), ("fp32", "fp32"), (None, "fp32")])
def test_a_run_that_resumes_keeps_the_precision_it_began_with(tmp_path: Path, began: Any, now: str) -> None:
    config = PretrainConfig(run_dir=str(tmp_path))
    if began is not None:
        of_run = config.model_copy(update={"platform": PlatformConfig(precision=began)})
        (tmp_path / "config.toml").write_text(dump_config(of_run))
    # A start that saved nothing began no run: it may have been on another machine.
    assert decided(config).platform.precision == "fp32"
    path_of_step(tmp_path / "checkpoints", 3).mkdir(parents=True)
    assert decided(config).platform.precision == now
    named = config.model_copy(update={"platform": PlatformConfig(precision="bf16")})
    assert decided(named) == named


@pytest.mark.full
def test_precision_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu_and_the_log_begins_with_it(tmp_path: Path) -> None:
    done = emulated("cuda", "tests.emulated_runs:precision", str(tmp_path))
    assert not done.returncode, done.stderr
    first, *_, on_gpu = done.stdout.splitlines()
    assert on_gpu == '"bf16"' and ", NCCL, bf16, " in first
    assert decided(PretrainConfig()).platform.precision == "fp32"


AUTO = PlatformConfig()


@pytest.fixture
def here(one_rank: Mesh) -> Platform:
    platform = start(AUTO)
    assert platform.layers_id == f"cpu {platform.build}" and platform.build
    return platform


def recorded(folder: Path, platform: Platform, *layers: str) -> RunFolder:
    attempt = asdict(this_run_attempt(platform, MeshConfig(), 0))
    assert attempt["layers"] == platform.layers_id
    (folder / "run.json").write_text(json.dumps([attempt | {"layers": started} for started in layers]))
    return RunFolder(folder)


def test_a_new_run_and_one_with_the_same_layers_go_on(tmp_path: Path, here: Platform) -> None:
    assert keep_layers(AUTO, here, RunFolder(tmp_path)) == (here, ())
    assert keep_layers(AUTO, here, recorded(tmp_path, here, "torch", here.layers_id)) == (here, ())


def test_a_run_of_torchs_layers_keeps_them(tmp_path: Path, here: Platform) -> None:
    resumed, warnings = keep_layers(AUTO, here, recorded(tmp_path, here, here.layers_id, "torch"))
    assert (resumed.layers, resumed.layers_id, warnings) == ("torch", "torch", ())
    assert "torch layers" in resumed.describe() and "(as in run.json)" in resumed.describe()


@pytest.mark.parametrize(
    "settings", [PlatformConfig(layers="cpu"), PlatformConfig(bf16_products=True)], ids=["layers", "products"]
)
def test_what_the_config_names_is_used_and_the_difference_reported(tmp_path, here, settings):
    resumed, (warning,) = keep_layers(settings, here, recorded(tmp_path, here, "torch"))
    assert resumed == here
    assert warning.startswith(f'run.json has the layers "torch", and this start computes with "cpu {here.build}"')
    assert "is not continued bit for bit" in warning


@pytest.mark.parametrize("then", ["cpu 0123456789abcdef", "te"])
def test_layers_that_are_not_here_are_reported(tmp_path: Path, here: Platform, then: str) -> None:
    resumed, (warning,) = keep_layers(AUTO, here, recorded(tmp_path, here, then))
    assert resumed == here and f'has the layers "{then}"' in warning
    without = here.with_torch_layers("there is no compiler")
    resumed, (warning,) = keep_layers(AUTO, without, recorded(tmp_path, here, here.layers_id))
    assert resumed == without and 'computes with "torch"' in warning
