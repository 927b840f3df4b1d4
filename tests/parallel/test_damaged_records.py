"""Files of a run folder that a resume does not need, and that are damaged: kept under another name, and reported."""

from pathlib import Path

import torch

from mcore_rl.config.load import dump_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.megatron.platform import start
from mcore_rl.metrics.attempts_file import read_attempts
from mcore_rl.metrics.jsonl import FILE_NAME
from mcore_rl.programs.open_run import open_run
from mcore_rl.train.loop import SupervisedTrainer
from mcore_rl.train.objectives import NextTokenHead
from tests.parallel.checkpointing import SMALL, config_of
from tests.ranks import run_ranks

DAMAGE = {"run.json": b'[{"started": "2026-01-', "config.toml": b"[model\n\xff"}


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
