from collections import namedtuple

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.planning.disk import disk_of, disk_warning
from mcore_rl.planning.training import training_of

USAGE = namedtuple("USAGE", "total used free")
DENSE = (
    "model.family=llama",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_hidden_size=128",
    "model.vocab_size=512",
)
# Query, key, value and output of attention, the MLP's three matrices, two norms; embedding, output layer, last norm.
WEIGHTS = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 512 * 64 + 64


def disk(*overrides, cls=PretrainConfig):
    return disk_of(training_of(load_config(cls, None, [*DENSE, *overrides]), 1))


@pytest.mark.parametrize(("precision", "bytes_per_weight"), [("bf16", 14), ("fp32", 16)])
def test_a_checkpoint_has_weights_and_three_fp32_numbers_for_each(precision, bytes_per_weight):
    found = disk(f"platform.precision={precision}")
    assert found.checkpoint == WEIGHTS * bytes_per_weight


def test_a_checkpoint_of_adapters_alone_has_no_other_weights():
    adapters = 2 * 8 * ((3 * 64 + 64 + 2 * 32 + 64 + 64) + (2 * 64 + 2 * 128 + 128 + 64))
    lora = ("lora.rank=8", "checkpoint.load=base")
    assert disk(*lora).checkpoint == 4 * WEIGHTS + 16 * adapters
    assert disk(*lora, "checkpoint.weights=adapters").checkpoint == 16 * adapters


@pytest.mark.parametrize(
    ("keep", "interval", "number"), [("2", "10", 3), ("all", "30", 4), ("5", "60", 2), ("2", "none", 1)]
)
def test_the_kept_checkpoints_are_counted_and_the_one_that_is_written(keep, interval, number):
    words = ("train.steps=100", f"checkpoint.keep={keep}", f"checkpoint.interval={interval}")
    assert disk(*words).num_checkpoints == number


def test_a_critic_is_saved_beside_the_policy():
    plain = disk(cls=RlRunConfig).checkpoint
    critic = disk("rl.advantage.kind=gae", cls=RlRunConfig).checkpoint
    # One row of weights in the place of the output layer's 512, and the shift of the scores, 4 bytes.
    assert critic - plain in ((WEIGHTS - 511 * 64) * 16, (WEIGHTS - 511 * 64) * 16 + 4)


def test_samples_of_rl_are_counted():
    words = [
        "model.family=qwen3_moe",
        "model.moe.num_experts=8",
        "model.moe.top_k=2",
        "train.steps=80",
        "train.global_batch=16",
        "rl.rollout.prompts_per_step=4",
        "rl.rollout.group_size=8",
        "rl.rollout.max_new_tokens=100",
        "rl.prompts.max_tokens=28",
        "rl.samples.interval=10",
    ]
    # 80 steps, two for each of 40 rollouts of 32 completions; every tenth is written, with 5 bytes a token.
    assert disk(*words, cls=RlRunConfig).samples == 4 * 32 * 128 * 5


def test_too_little_room_is_a_warning_and_what_is_there_already_counts(tmp_path, monkeypatch):
    run_dir, planned = tmp_path / "runs/a", disk("train.steps=100", "checkpoint.interval=10")
    total = planned.total
    monkeypatch.setattr("shutil.disk_usage", lambda path: USAGE(total, 1000, total - 1000))
    warning = disk_warning(run_dir, planned)
    assert (
        f"{tmp_path} has" in warning and "3 checkpoints of" in warning and "lower checkpoint.keep" in warning
    )
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints/0.distcp").write_bytes(bytes(1000))
    assert disk_warning(run_dir, planned) == ""
