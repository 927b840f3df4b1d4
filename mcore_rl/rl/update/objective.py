"""Functions and coefficients that the sections `rl.loss` and `rl.advantage` select."""

from functools import partial

import torch
from torch import Tensor

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl.advantage import AnyAdvantage, OwnAdvantage, ZscoreAdvantage
from mcore_rl.config.rl.distill import DistillConfig
from mcore_rl.config.rl.loss import (
    AnyLoss,
    CispoLoss,
    GrpoLoss,
    GspoLoss,
    GspoTokenLoss,
    KimiK2Loss,
    OwnLoss,
    PpoLoss,
    RspoLoss,
)
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.objectives.advantages import (
    Estimate,
    group_centered,
    group_zscore,
    leave_one_out,
    leave_one_out_zscore,
)
from mcore_rl.rl.objectives.losses import (
    KlTerm,
    Objective,
    TokenObjective,
    cispo,
    grpo,
    gspo_token,
    kimi_k2,
    rspo,
)
from mcore_rl.rl.objectives.policy_tokens import PolicyTokens, TokenLoss


def policy_objective(loss: AnyLoss, distill: DistillConfig | None = None) -> Objective:
    """Return the terms of the policy's loss; without `distill` it has no teacher term."""
    has_kl = loss.kl_coeff and loss.kl_in == "loss"
    has_teacher = distill is not None and distill.use == "loss"
    return Objective(
        token_loss=_token_loss(loss),
        shift_floor=loss.shift_floor,
        correction=loss.correction,
        kl=KlTerm(loss.kl_coeff, loss.kl_estimator, loss.kl_gradient) if has_kl else None,
        teacher_coeff=distill.coeff if distill is not None and has_teacher else None,
        entropy_coeff=loss.entropy_coeff,
    )


def _token_loss(loss: AnyLoss) -> TokenObjective:
    match loss:
        case GrpoLoss() | PpoLoss():
            return partial(grpo, clip=loss.clip, dual_clip=loss.dual_clip, shift_floor=loss.shift_floor)
        case GspoLoss() | GspoTokenLoss():
            return partial(gspo_token, clip=loss.clip, dual_clip=loss.dual_clip, shift_floor=loss.shift_floor)
        case RspoLoss():
            return partial(rspo, clip=loss.clip, shift_floor=loss.shift_floor)
        case KimiK2Loss():
            return partial(kimi_k2, tau=loss.tau)
        case CispoLoss():
            return partial(cispo, clip=loss.clip)
        case OwnLoss():
            own = load_extension("rl.loss.kind", loss.kind)

            def of_section(tokens: PolicyTokens, cp: Axis) -> TokenLoss:
                found: TokenLoss = own(tokens, loss, cp)
                return found

            return of_section


def group_estimate(advantage: AnyAdvantage) -> Estimate:
    """Return the function that maps rewards `[P, G]` of groups to advantages."""
    if isinstance(advantage, OwnAdvantage):
        return partial(_own_advantages, advantage)
    if isinstance(advantage, ZscoreAdvantage):
        estimates = {"zscore": group_zscore, "leave_one_out_zscore": leave_one_out_zscore}
        return partial(estimates[advantage.kind], ddof=advantage.ddof, eps=advantage.eps)
    plain: dict[str, Estimate] = {
        "mean": group_centered,
        "leave_one_out": leave_one_out,
        "zero": torch.zeros_like,
        "remax": torch.zeros_like,  # compared with a baseline, not within the group
    }
    return plain[advantage.kind]


def _own_advantages(advantage: OwnAdvantage, rewards_PG: Tensor) -> Tensor:
    advantages_PG: Tensor = load_extension("rl.advantage.kind", advantage.kind)(rewards_PG, advantage)
    if advantages_PG.shape != rewards_PG.shape:
        raise ConfigError(
            f'rl.advantage.kind="{advantage.kind}" returned shape {tuple(advantages_PG.shape)} for rewards of shape '
            f"{tuple(rewards_PG.shape)}. Make the function return one advantage for each reward."
        )
    return advantages_PG
