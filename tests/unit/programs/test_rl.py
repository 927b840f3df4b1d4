"""The messages of a reinforcement-learning run at its start."""

from pathlib import Path

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.programs.rl import warnings_of

ALONE = ("checkpoint.load=none", "rl.loss.kind=gspo")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.moe.aux_loss_coeff=0.001"], "model.moe.aux_loss_coeff=0.001"),
        (
            ["model.moe.aux_loss_coeff=0.001", "model.moe.z_loss_coeff=0.002"],
            "model.moe.aux_loss_coeff=0.001, model.moe.z_loss_coeff=0.002",
        ),
        (["model.moe.balance=none", "model.moe.z_loss_coeff=0.002"], "model.moe.z_loss_coeff=0.002"),
        (
            ["model.moe.aux_loss_coeff=0", "model.moe.expert_bias=true", "model.moe.expert_bias_rate=0.003"],
            "model.moe.expert_bias_rate=0.003",
        ),
        (["model.moe.aux_loss_coeff=0"], None),
        (["model.moe.balance=none"], None),
        (["model.moe.aux_loss_coeff=0", "model.moe.expert_bias=true", "rl.freeze_router=true"], None),
        (["model.family=qwen3", "model.moe.num_experts=0", "model.moe.aux_loss_coeff=0.001"], None),
    ],
)
def test_a_start_names_each_balance_that_moves_the_policy_beside_the_rewards(overrides, named):
    config = load_config(RlRunConfig, Path("tiny_moe/grpo"), [*ALONE, *overrides])
    messages = list(warnings_of(config))
    if named is None:
        assert not messages
    else:
        (message,) = messages
        assert message.startswith(f"{named}: the balance of the experts moves the policy too")
        assert "Set it to 0 to learn from rewards alone, and rl.freeze_router=true" in message


@pytest.mark.parametrize(("rollouts", "is_named"), [(60, True), (59, False)])
def test_a_reference_that_is_never_refreshed_is_named(rollouts: int, is_named: bool) -> None:
    """A rollout batch has two optimizer steps."""
    words = ["train.steps=120", "rl.loss.kl_coeff=0.1", f"rl.loss.reference_refresh_rollouts={rollouts}"]
    config = load_config(RlRunConfig, Path("tiny_moe/grpo"), [*ALONE, "model.moe.balance=none", *words])
    assert config.updates_per_rollout == 2
    found = [line for line in warnings_of(config) if "reference_refresh_rollouts" in line]
    assert len(found) == is_named


@pytest.mark.parametrize(
    ("overrides", "is_named"),
    [
        (["rl.engine.kind=vllm", "model.indexer.top_k=63"], True),
        (["rl.engine.kind=vllm", "model.indexer.top_k=64"], False),
        (["rl.engine.kind=native", "model.indexer.top_k=63"], False),
        (["rl.engine.kind=vllm"], False),
    ],
)
def test_servers_that_choose_other_keys_are_named(overrides: list[str], is_named: bool) -> None:
    words = ["rl.prompts.max_tokens=40", "rl.rollout.max_new_tokens=24", "model.moe.balance=none"]
    config = load_config(RlRunConfig, Path("tiny_moe/grpo"), [*ALONE, *words, *overrides])
    found = [line for line in warnings_of(config) if "servers choose by kernels of their own" in line]
    assert len(found) == is_named
    assert not found or "samples have up to 64 tokens, of which indexers choose 63" in found[0]


@pytest.mark.parametrize(
    ("overrides", "is_named"),
    [
        ([], True),
        (["rl.loss.importance_sampling=sequence_truncate"], False),
        (["rl.update.old_logprobs=rollout"], False),
        (["rl.engine.weights=as_trained"], False),
    ],
)
def test_servers_with_weights_in_8_bits_are_named_unless_the_loss_corrects_for_them(
    overrides: list[str], is_named: bool
) -> None:
    words = ["rl.engine.kind=vllm", "rl.engine.weights=fp8_block", "model.moe.balance=none", *overrides]
    found = list(warnings_of(load_config(RlRunConfig, Path("tiny_moe/grpo"), [*ALONE, *words])))
    assert any("another policy than is trained" in line and 'replay.kind="r3"' in line for line in found) == is_named


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("rl.loss.kind=sapo rl.loss.importance_sampling=truncate", "no clip ends"),
        ("rl.loss.kind=kimi_k2", "no clip ends"),
        ("rl.loss.kind=sapo rl.loss.importance_sampling=truncate rl.rollout.max_staleness=0", None),
        ("rl.loss.kind=grpo rl.loss.importance_sampling=truncate rl.rollout.max_staleness=8", None),
        ("rl.loss.kind=gspo rl.loss.importance_sampling=sequence_mask", None),
        ("rl.loss.kind=cispo rl.loss.importance_sampling=mask", None),
        ("rl.loss.kind=dppo_tv rl.update.old_logprobs=rollout", None),
        ("rl.loss.kind=my.module:loss rl.loss.importance_sampling=mask", None),
        ("rl.loss.kind=grpo rl.loss.importance_sampling=truncate rl.rollout.max_staleness=9", "2 to 8"),
    ],
)
def test_rollouts_of_older_weights_are_warned_of_without_a_clip_or_many_batches_ahead(
    overrides: str, named: str | None
) -> None:
    words = ["rl.engine.kind=vllm", "rl.rollout.max_staleness=1", *overrides.split()]
    config = load_config(RlRunConfig, Path("tiny_moe/grpo"), words)
    found = [line for line in warnings_of(config) if "rl.rollout.max_staleness" in line]
    assert len(found) == bool(named)
    assert not found or (named in found[0] and ("2510.01161" in found[0] or "AReaL" in found[0]))
