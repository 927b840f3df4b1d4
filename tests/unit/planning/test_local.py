from pathlib import Path

import torch

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.platform import Platform
from mcore_rl.planning.local import device_memory_lines
from mcore_rl.planning.memory import GIB
from mcore_rl.planning.training import training_of
from mcore_rl.programs import open_run

GRPO = Path(__file__).parents[3] / "launch/recipes/qwen3_30b_a3b/grpo_r2.toml"


def test_the_estimate_stands_beside_the_memory_of_the_device_and_warns_above_it():
    config = load_config(RlRunConfig, GRPO)
    (line,) = device_memory_lines(training_of(config, 16), 80 * GIB)
    assert line.startswith(
        "memory, estimated: 60.0 GiB on a rank of pipeline stage 0 (weights 7.5, gradients 15.0"
    )
    assert line.endswith(" of 80.0")
    _, warning = device_memory_lines(training_of(config, 8), 80 * GIB)
    assert warning.startswith("warning: the estimate is 2.3 GiB more") and "mcore-rl plan" in warning


def test_a_start_logs_it_where_the_memory_of_the_device_is_known(monkeypatch):
    platform = Platform(
        device=torch.device("cpu"), dtype=torch.bfloat16, layers="torch", rank=0, local_rank=0, world_size=16,
        deterministic=False,
    )  # fmt: skip
    config = load_config(RlRunConfig, GRPO)
    assert open_run._memory_lines(config, platform) == []
    monkeypatch.setattr(Platform, "device_bytes", 140 * GIB)
    assert open_run._memory_lines(config, platform)[0].endswith(" of 140.0")
