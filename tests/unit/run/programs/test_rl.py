"""The messages of a reinforcement-learning run at its start."""

from pathlib import Path

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.run.programs.rl import warnings_of

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
        (
            ["model.moe.aux_loss_coeff=0", "model.moe.expert_bias=true", "rl.freeze_router=true"],
            None,
        ),
        (["model.family=qwen3", "model.moe.num_experts=0", "model.moe.aux_loss_coeff=0.001"], None),
    ],
)
def test_a_start_names_each_balance_that_moves_the_policy_beside_the_rewards(
    overrides: list[str], named: str | None
) -> None:
    config = load_config(RlRunConfig, Path("tiny_moe/grpo"), [*ALONE, *overrides])
    messages = list(warnings_of(config))
    if named is None:
        assert not messages
    else:
        (message,) = messages
        assert message.startswith(f"{named}: the balance of the experts moves the policy too")
        assert "Set it to 0 to learn from rewards alone, and rl.freeze_router=true" in message
