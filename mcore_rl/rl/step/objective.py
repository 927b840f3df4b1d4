"""Functions and coefficients that the sections `rl.loss` and `rl.advantage` select."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl import loss as sections
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import Axis, Mesh
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.batch import Advantages, Minibatch, PolicyMicrobatch, at_positions, samples_of
from mcore_rl.rl.step import advantages, losses
from mcore_rl.rl.types import Rollout, SampleShape


class RewardKl(Protocol):
    """KL of the old policy to a reference, as a penalty on rewards."""

    @property
    def coeff(self) -> float:
        """Coefficient in this rollout batch."""

    def of_tokens(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return the KL `[T]` at each position of a microbatch, on the last stage."""

    def sums(self, num_samples: int, minibatches: Sequence[Minibatch]) -> Tensor:
        """Collective over the world: return the KL summed over each completion, float64 `[N]`."""


def policy_objective(loss: sections.AnyLoss, distill: sections.DistillConfig | None = None) -> losses.Objective:
    """Return the terms of the policy's loss; without `distill` it has no teacher term."""
    has_kl = loss.kl_coeff and loss.kl_in == "loss"
    has_teacher = distill is not None and distill.use == "loss"
    return losses.Objective(
        token_loss=_token_loss(loss),
        shift_floor=loss.shift_floor,
        correction=loss.correction,
        off_policy_mask=loss.off_policy_mask if isinstance(loss, sections.Corrected) else None,
        kl=losses.KlTerm(loss.kl_to, loss.kl_coeff, loss.kl_estimator, loss.kl_gradient) if has_kl else None,
        teacher_coeff=distill.reverse_coeff if distill is not None and has_teacher else None,
        forward_coeff=0.0 if distill is None else distill.coeff * distill.forward_weight,
        entropy_coeff=loss.entropy_coeff,
    )


def _token_loss(loss: sections.AnyLoss) -> losses.TokenObjective:
    match loss:
        case sections.GrpoLoss() | sections.PpoLoss():
            return partial(losses.grpo, clip=loss.clip, dual_clip=loss.dual_clip, shift_floor=loss.shift_floor)
        case sections.GspoLoss() | sections.GspoTokenLoss():
            return partial(losses.gspo_token, clip=loss.clip, dual_clip=loss.dual_clip, shift_floor=loss.shift_floor)
        case sections.RspoLoss():
            return partial(losses.rspo, clip=loss.clip, shift_floor=loss.shift_floor)
        case sections.KimiK2Loss():
            return partial(losses.kimi_k2, tau=loss.tau)
        case sections.CispoLoss():
            return partial(losses.cispo, clip=loss.clip)
        case sections.DppoTvLoss():
            return partial(losses.dppo_tv, clip=loss.clip, ratio_limit=loss.ratio_limit)
        case sections.SapoLoss():
            return partial(losses.sapo, tau_positive=loss.tau_positive, tau_negative=loss.tau_negative)
        case sections.OwnLoss():
            own = load_extension("rl.loss.kind", loss.kind)

            def of_section(tokens: losses.PolicyTokens, cp: Axis) -> losses.TokenLoss:
                found: losses.TokenLoss = own(tokens, loss, cp)
                return found

            return of_section


def group_estimate(advantage: sections.AnyAdvantage) -> advantages.Estimate:
    """Return the function from rewards `[P, G]`, and for a user's function their parts, to advantages."""
    if isinstance(advantage, sections.OwnAdvantage):
        return partial(_own_advantages, advantage)
    if isinstance(advantage, sections.ZscoreAdvantage):
        estimates = {"zscore": advantages.group_zscore, "leave_one_out_zscore": advantages.leave_one_out_zscore}
        return partial(estimates[advantage.kind], ddof=advantage.ddof, eps=advantage.eps)
    plain: dict[str, advantages.Estimate] = {
        "mean": advantages.group_centered,
        "leave_one_out": advantages.leave_one_out,
        "zero": torch.zeros_like,
        "remax": torch.zeros_like,  # compared with a baseline, not within the group
    }
    return plain[advantage.kind]


def _own_advantages(advantage: sections.OwnAdvantage, rewards_PG: Tensor, parts_PGK: Tensor) -> Tensor:
    advantages_PG: Tensor = load_extension("rl.advantage.kind", advantage.kind)(rewards_PG, advantage, parts_PGK)
    if advantages_PG.shape != rewards_PG.shape:
        raise ConfigError(
            f'rl.advantage.kind="{advantage.kind}" returned shape {tuple(advantages_PG.shape)} for rewards of shape '
            f"{tuple(rewards_PG.shape)}. Make the function return one advantage for each reward."
        )
    return advantages_PG


def token_advantages(
    advantage: sections.DiscountedAdvantage,
    kl: RewardKl | None,
    rollout: Rollout,
    minibatches: Sequence[Minibatch],
    *,
    mesh: Mesh,
    device: torch.device,
) -> Advantages:
    """Collective over the world: return each token's advantage, by a critic or as a discounted sum of rewards, with or
    without each prompt's mean reward as the baseline. On the last stage `minibatches` have old and reference logprobs
    if `kl` is given, which is subtracted from rewards, and values if there is a critic.
    """
    gae = advantage if isinstance(advantage, sections.GaeAdvantage) else None
    has_kl, has_critic = kl is not None, gae is not None

    def numbers(microbatch: PolicyMicrobatch) -> list[Tensor]:
        found = []
        if kl is not None:
            found.append(kl.of_tokens(microbatch))
        if has_critic:
            assert microbatch.values_T is not None
            found.append(microbatch.values_T)
        return found

    samples = samples_of(minibatches)
    shapes = [rollout.shapes[index] for index in samples]
    tables = _tables_of_completions(minibatches, rollout.shapes, numbers, has_kl + has_critic, mesh, device)
    none_NC = torch.zeros(tables.shape[1:], dtype=torch.float64)
    kl_NC, values_NC = tables[0] if has_kl else none_NC, tables[-1] if has_critic else none_NC
    lengths_N = torch.tensor([shape.num_trained for shape in shapes], dtype=torch.int64)
    is_token_NC = torch.arange(none_NC.shape[1]) < lengths_N[:, None]
    rewards_PG, group_size = rollout.rewards_PG, rollout.rewards_PG.shape[1]
    if advantage.kind == "reinforce_plus_plus_baseline":
        rewards_PG = advantages.above_group_mean(rewards_PG)
    rewards_NC = advantages.token_rewards(
        rewards_PG.flatten()[samples],
        kl_NC,
        lengths_N,
        kl_coeff=0.0 if kl is None else kl.coeff,
        steps_NI=[rollout.steps_PGI[index // group_size][index % group_size] for index in samples]
        if advantage.uses_steps
        else (),
    )
    ends_N = torch.zeros(len(samples), dtype=torch.float64)
    if gae is not None and gae.bootstrap_truncated:
        # The last token does not enter the model: the state before it is the last state with a value.
        last_N = values_NC.gather(1, (lengths_N - 1).clamp(min=0)[:, None])[:, 0]
        ends_N = last_N.where(torch.tensor([shape.is_truncated for shape in shapes], dtype=torch.bool), 0.0)

    def estimated(lambda_: float | str) -> Tensor:
        if isinstance(lambda_, str):
            assert gae is not None
            lambda_N = advantages.length_adaptive_lambda(lengths_N, gae.length_alpha)
        else:
            lambda_N = torch.full((len(samples),), lambda_, dtype=torch.float64)
        return advantages.generalized_advantages(
            rewards_NC, values_NC, lengths_N, gamma=advantage.gamma, lambda_N=lambda_N, ends_N=ends_N
        )

    def by_sample(numbers_NC: Tensor) -> dict[int, Tensor]:
        rows = zip(samples, shapes, numbers_NC.float(), strict=True)
        return {index: at_positions(row_C, shape) for index, shape, row_C in rows}

    # Without values, an advantage with lambda 1 is the return-to-go.
    advantages_NC = estimated(1.0 if gae is None else gae.gae_lambda)
    # All ranks of a model replica have the same numbers; only data-parallel ranks differ.
    moments = advantages.world_moments(advantages_NC[is_token_NC].to(device), mesh.dp)
    policy_NC = advantages_NC
    if gae is None or gae.whiten:
        policy_NC = advantages.whitened(advantages_NC, lengths_N, moments, ddof=advantage.ddof, eps=advantage.eps)
    if gae is None:
        return Advantages(of_samples=by_sample(policy_NC))
    critic_lambda = gae.critic.gae_lambda
    if critic_lambda == "auto":
        critic_lambda = 1.0 if gae.gae_lambda == "length" else gae.gae_lambda
    returns_NC = values_NC + estimated(critic_lambda)
    values = advantages.world_moments(values_NC[is_token_NC].to(device), mesh.dp)
    returns = advantages.world_moments(returns_NC[is_token_NC].to(device), mesh.dp)
    errors = advantages.world_moments((returns_NC - values_NC)[is_token_NC].to(device), mesh.dp)
    metrics = [
        Metric("values/mean", values.mean),
        Metric("values/returns_mean", returns.mean),
        Metric("values/returns_std", returns.std(0)),
        Metric("values/advantages_std", moments.std(0)),
    ]
    # Returns are sums of values and rewards: for equal rewards they differ only by rounding.
    if not returns.are_equal(returns.size + values.size):
        metrics.append(Metric("values/explained_variance", 1.0 - errors.squares / returns.squares))
    return Advantages(of_samples=by_sample(policy_NC), returns=by_sample(returns_NC), metrics=metrics)


def _tables_of_completions(
    minibatches: Sequence[Minibatch],
    shapes: Mapping[int, SampleShape],
    numbers: Callable[[PolicyMicrobatch], list[Tensor]],
    num_tables: int,
    mesh: Mesh,
    device: torch.device,
) -> Tensor:
    """Collective over the context- and pipeline-parallel ranks: gather the tensors `[T]` that `numbers` returns on the
    last stage into tables by sample and sampled token, `[tables, N, C]`, float64 on the CPU, with zeros in padding. An
    environment's tokens have no column: the state after a turn is the state before the next.
    """
    samples = samples_of(minibatches)
    longest = max((shapes[index].num_sampled for index in samples), default=0)
    tables_FNC = torch.zeros(num_tables, len(samples), longest, dtype=torch.float64, device=device)
    if not tables_FNC.numel():
        return tables_FNC.cpu()
    row_of = {index: row for row, index in enumerate(samples)}
    if mesh.is_last_stage:
        microbatches = (each for minibatch in minibatches for each in minibatch.microbatches if each.samples)
        for microbatch in microbatches:
            rows_N = torch.tensor([row_of[index] for index in microbatch.samples], device=device)
            # At each position that predicts a sampled token, the token's index among the sampled tokens.
            columns = [at_positions(torch.arange(shapes[n].num_sampled), shapes[n]) for n in microbatch.samples]
            column_NP = pad_sequence(columns, batch_first=True)
            here_T = microbatch.completion_mask_T
            sequence_T = microbatch.sequence_T[here_T]
            columns_T = column_NP.to(device)[sequence_T, microbatch.place_T[here_T]]
            for table_NC, numbers_T in zip(tables_FNC, numbers(microbatch), strict=True):
                table_NC[rows_N[sequence_T], columns_T] = numbers_T[here_T].double()
        # Each context-parallel rank filled its own positions.
        if mesh.cp.size > 1:
            dist.all_reduce(tables_FNC, group=mesh.cp.group)
    # Only the last stage has logits and values, and every stage needs the same advantages.
    if mesh.pp.size > 1:
        dist.broadcast(tables_FNC, group=mesh.pp.group, group_src=mesh.pp.size - 1)
    return tables_FNC.cpu()


Estimator = Callable[[Rollout, Sequence[Minibatch]], Advantages]
"""Function from a rollout batch and this rank's minibatches of it to the samples' advantages. Collective over the
world."""


def estimator_of(
    advantage: sections.AnyAdvantage,
    kl: RewardKl | None,
    mesh: Mesh,
    device: torch.device,
    *,
    part_weights: Sequence[float],
) -> Estimator:
    """Return the estimator for `rl.advantage`; `kl` is the KL penalty on rewards, None without a penalty.
    `part_weights` are the weights of `Rollout.parts_PGK`.
    """
    if isinstance(advantage, sections.DiscountedAdvantage):
        return partial(token_advantages, advantage, kl, mesh=mesh, device=device)
    if isinstance(advantage, sections.DividedAdvantage) and advantage.kind == "steps":
        return partial(_of_steps, advantage)
    if isinstance(advantage, sections.DecoupledAdvantage):
        return partial(_of_parts, advantage, part_weights)
    spares = advantage.kind == "leave_one_out_zscore"
    return partial(_of_completions, group_estimate(advantage), kl, spares_equal_others=spares)


def _of_steps(advantage: sections.DividedAdvantage, rollout: Rollout, minibatches: Sequence[Minibatch]) -> Advantages:
    group_size = rollout.rewards_PG.shape[1]
    by_sample = {}
    for p in sorted({index // group_size for index in samples_of(minibatches)}):
        shapes = [rollout.shapes[p * group_size + g] for g in range(group_size)]
        lengths = [shape.num_sampled for shape in shapes]
        tokens_GC = advantages.step_advantages(rollout.steps_PGI[p], lengths, ddof=advantage.ddof, eps=advantage.eps)
        for g, (shape, tokens_C) in enumerate(zip(shapes, tokens_GC, strict=True)):
            by_sample[p * group_size + g] = at_positions(tokens_C, shape)
    return Advantages(of_samples=by_sample)


def _of_parts(
    advantage: sections.DecoupledAdvantage,
    weights_K: Sequence[float],
    rollout: Rollout,
    minibatches: Sequence[Minibatch],
) -> Advantages:
    assert rollout.parts_PGK is not None
    advantages_PG = advantages.decoupled_advantages(
        rollout.rewards_PG, rollout.parts_PGK, weights_K, ddof=advantage.ddof, eps=advantage.eps
    )
    return _of_whole(advantages_PG, rollout, minibatches)


def _of_completions(
    estimate: advantages.Estimate,
    kl: RewardKl | None,
    rollout: Rollout,
    minibatches: Sequence[Minibatch],
    *,
    spares_equal_others: bool,
) -> Advantages:
    rewards_PG, parts_PGK = rollout.rewards_PG, rollout.parts_PGK
    kl_PG = None if kl is None else kl.sums(rewards_PG.numel(), minibatches).view_as(rewards_PG)
    coeff = 0.0 if kl is None else kl.coeff
    if rollout.baseline_P is not None:
        penalised_PG = rewards_PG if kl_PG is None else rewards_PG - coeff * kl_PG
        advantages_PG = advantages.above_baseline(penalised_PG, rollout.baseline_P)
    elif kl_PG is not None:
        advantages_PG = advantages.kl_penalised_advantages(
            rewards_PG, kl_PG, estimate, coeff=coeff, spares_equal_others=spares_equal_others, parts_PGK=parts_PGK
        )
    else:
        advantages_PG = advantages.group_advantages(rewards_PG, estimate, parts_PGK)
    return _of_whole(advantages_PG, rollout, minibatches)


def _of_whole(advantages_PG: Tensor, rollout: Rollout, minibatches: Sequence[Minibatch]) -> Advantages:
    """Return advantages that are equal for all tokens of a completion."""
    advantages_N = advantages_PG.flatten()
    return Advantages(
        of_samples={
            index: advantages_N[index].expand(rollout.shapes[index].num_positions) for index in samples_of(minibatches)
        }
    )
