"""Sections that are unions by kind, from their fields."""

from typing import Any

from mcore_rl.config.rl.loss import AnyAdvantage, AnyLoss, GaeAdvantage
from mcore_rl.config.rl.rollout import AnyEngine
from mcore_rl.config.rl_run import RlConfig


def loss_config(**fields: Any) -> AnyLoss:
    """Return `rl.loss` with these fields."""
    return RlConfig.model_validate({"loss": fields}).loss


def advantage_config(**fields: Any) -> AnyAdvantage:
    """Return `rl.advantage` with these fields."""
    return RlConfig.model_validate({"advantage": fields}).advantage


def engine_config(**fields: Any) -> AnyEngine:
    """Return `rl.engine` with these fields."""
    return RlConfig.model_validate({"engine": fields}).engine


def with_critic(rl: RlConfig, **fields: Any) -> RlConfig:
    """Return the section with other fields of the critic of its advantages."""
    assert isinstance(rl.advantage, GaeAdvantage)
    critic = rl.advantage.critic.model_copy(update=fields)
    return rl.model_copy(update={"advantage": rl.advantage.model_copy(update={"critic": critic})})
