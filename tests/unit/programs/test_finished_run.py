"""A start in the folder of a finished run: only the same one is told that there is nothing to do."""

from pathlib import Path

import pytest

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import CheckpointConfig, PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig, SFTDataConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.programs.finished_run import changes_since_done, refuse_other_run
from tests.finished import finish


def refuse(config: RunConfig) -> None:
    refuse_other_run(config.run_dir, changes_since_done(config), config.checkpoint.allow_changes)


def test_the_same_run_is_done_whatever_its_rate_now_and_an_unknown_one_too(tmp_path: Path) -> None:
    done = finish(SFTConfig(run_dir=str(tmp_path)))
    refuse(done)
    other_rate = done.model_copy(update={"optim": OptimConfig(lr=1e-5)})
    refuse(other_rate)
    assert [change.key for change in changes_since_done(other_rate)] == ["optim.lr"]
    refuse(done.model_copy(update={"run_dir": str(tmp_path / "without_checkpoints")}))


@pytest.mark.parametrize("cls", [RlRunConfig, PretrainConfig])
def test_a_finished_run_of_another_program_is_refused(tmp_path: Path, cls: type[RunConfig]) -> None:
    finish(SFTConfig(run_dir=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"finished run of sft, and this is .* Choose another run_dir"):
        refuse(cls(run_dir=str(tmp_path)))


def test_a_finished_run_of_another_model_or_tokenizer_is_refused_unless_allowed(tmp_path: Path) -> None:
    done = finish(SFTConfig(run_dir=str(tmp_path)))
    tokenizer = TokenizerConfig(kind="huggingface", path="other")
    other = done.model_copy(
        update={"model": ModelConfig(num_layers=3), "data": SFTDataConfig(tokenizer=tokenizer)}
    )
    with pytest.raises(ConfigError) as raised:
        refuse(other)
    for said in ("model.num_layers is 4 there, 3 here", "data.tokenizer.path", "checkpoint.allow_changes="):
        assert said in str(raised.value)
    allowed = CheckpointConfig(allow_changes=("model.num_layers", "data"))
    refuse(other.model_copy(update={"checkpoint": allowed}))
