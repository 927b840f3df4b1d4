"""Objectives against the papers' formulas in float64: values and gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

from mcore_rl.metrics.metrics import reduced
from mcore_rl.rl.step.losses import policy_loss
from mcore_rl.rl.step.objective import policy_objective
from mcore_rl.rl.step_log import staleness_metrics, update_metrics
from tests.sections import loss_config
from tests.unit.rl.ragged import ALONE, CUT, batch, over_sequences, responses, tokens_of, with_gradient

KINDS = ("grpo", "gspo", "gspo_token", "rspo", "kimi_k2", "cispo", "dppo_tv", "sapo")


def loss_of(rows, config, **options):
    """As one microbatch: sum over count."""
    options = {"aggregation": config.aggregation_in_use} | options
    result = policy_loss(tokens_of(rows, **options), policy_objective(config), ALONE)
    return result.loss / result.count


def same(rows, ours, closed_form, tolerance=1e-9):
    """Both give the same number and the same gradient, which is not zero."""
    value, gradients = with_gradient(rows, ours)
    wanted, wanted_gradients = with_gradient(rows, closed_form)
    assert abs(value - wanted) <= tolerance
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=tolerance)
    assert gradients[0].abs().max() > 1e-6
    return wanted


def min_of_clipped(ratio, advantage, low, high):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo_token(response, low=0.2, high=0.2):
    ratio = torch.exp(response["logprobs"] - response["old_logprobs"])
    return -min_of_clipped(ratio, response["advantages"], low, high)


def gspo_sequence(response, low, high):
    ratio = torch.exp((response["logprobs"] - response["old_logprobs"]).mean())
    return -min_of_clipped(ratio, response["advantages"][0], low, high)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_grpo_is_a_mean_over_sequences_of_token_means(spread, seed):
    rows = batch(spread, seed)
    config = loss_config(clip_low=0.2, clip_high=0.28)
    same(
        rows,
        lambda rows: loss_of(rows, config),
        lambda rows: over_sequences(rows, lambda response: grpo_token(response, high=0.28).mean()),
    )


def test_token_mean_divides_by_all_tokens():
    same(
        batch(),
        lambda rows: loss_of(rows, loss_config(aggregation="token_mean")),
        lambda rows: torch.cat([grpo_token(response) for response in responses(rows)]).mean(),
    )


def test_dr_grpo_divides_a_sequence_by_a_constant():
    same(
        batch(),
        lambda rows: loss_of(rows, loss_config(aggregation="seq_mean_token_sum_norm"), norm_tokens=31),
        lambda rows: over_sequences(rows, lambda response: grpo_token(response).sum() / 31),
    )


def test_dual_clip_bounds_what_a_bad_completion_counts():
    def bounded(response):
        value, advantage = -grpo_token(response), response["advantages"]
        return -torch.where(advantage < 0, torch.maximum(value, 1.5 * advantage), value).mean()

    rows = batch(0.6)
    config = loss_config(dual_clip=1.5)
    wanted = same(rows, lambda rows: loss_of(rows, config), lambda rows: over_sequences(rows, bounded))
    assert abs(wanted - loss_of(rows, loss_config())) > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("spread", "low", "high"), [(0.3, 0.05, 0.07), (0.001, 3e-4, 4e-4), (1e-5, 3e-4, 4e-4)])
def test_gspo_clips_the_ratio_of_the_sequence(spread, low, high, seed):
    same(
        batch(spread, seed),
        lambda rows: loss_of(rows, loss_config(kind="gspo", clip_low=low, clip_high=high)),
        lambda rows: over_sequences(rows, lambda response: gspo_sequence(response, low, high)),
    )


@pytest.mark.parametrize("spread", [0.3, 0.001])
def test_gspo_token_equals_gspo_when_a_sequence_has_one_advantage(spread):
    clip = {"clip_low": 0.03, "clip_high": 0.04}
    same(
        batch(spread),
        lambda rows: loss_of(rows, loss_config(kind="gspo_token", **clip)),
        lambda rows: over_sequences(rows, lambda response: gspo_sequence(response, 0.03, 0.04)),
    )


def test_gspo_token_has_the_ratio_of_the_sequence_and_the_advantage_of_the_token():
    def closed_form(response):
        mean = (response["logprobs"] - response["old_logprobs"]).mean()
        ratio = torch.exp(mean).detach() * torch.exp(response["logprobs"] - response["logprobs"].detach())
        return -min_of_clipped(ratio, response["token_advantages"], 0.05, 0.07).mean()

    config = loss_config(kind="gspo_token", clip_low=0.05, clip_high=0.07)
    same(
        batch(),
        lambda rows: loss_of(rows, config, advantages="token_advantages"),
        lambda rows: over_sequences(rows, closed_form),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("spread", "floor"), [(0.3, 0.8), (0.3, 0.05), (0.05, 1.0)])
def test_rspo_clips_the_ratios_of_tokens_times_the_router_shift_and_takes_their_geometric_mean(spread, floor, seed):
    """The paper's formula with bounds e^-0.1 and e^0.1; at a floor of 1 it is GMPO."""

    def closed_form(response):
        advantage = response["advantages"][0]
        sign = advantage.sign()
        ratio = torch.exp(response["logprobs"] - response["old_logprobs"])
        ratio = (ratio * response["router_shift"].clamp(min=floor).detach()) ** sign
        bounded = torch.minimum(ratio, ratio.clamp(math.exp(-0.1), math.exp(0.1)))
        return -advantage * bounded.log().mean().mul(sign).exp()

    rows = batch(spread, seed)
    config = loss_config(
        kind="rspo", clip_low=1 - math.exp(-0.1), clip_high=math.exp(0.1) - 1, router_shift_floor=floor
    )
    ours = same(rows, lambda rows: loss_of(rows, config), lambda rows: over_sequences(rows, closed_form))
    rows["router_shift"] = torch.ones_like(rows["router_shift"])
    gmpo = loss_of(rows, config)
    assert (abs(float(ours - gmpo)) < 1e-12) == (floor == 1.0)


def test_the_router_shift_multiplies_the_ratio_of_other_objectives_before_their_clip():
    def shifted(response, floor):
        shift = response["router_shift"].clamp(min=floor)
        return response | {"old_logprobs": response["old_logprobs"] - shift.log()}

    rows, options = batch(), {"router_shift": True, "router_shift_floor": 0.7}
    for config, token in (
        (loss_config(**options), lambda response: grpo_token(response).mean()),
        (loss_config(kind="ppo", aggregation="seq_mean_token_mean", **options), lambda r: grpo_token(r).mean()),
        (
            loss_config(kind="gspo", clip_low=0.2, clip_high=0.3, **options),
            lambda response: gspo_sequence(response, 0.2, 0.3),
        ),
    ):
        same(
            rows,
            lambda rows, config=config: loss_of(rows, config),
            lambda rows, token=token: over_sequences(rows, lambda response: token(shifted(response, 0.7))),
        )
        metrics = metrics_of(policy_loss(tokens_of(rows), policy_objective(config), ALONE))
        shift = rows["router_shift"][rows["mask"]]
        assert metrics["policy/router_shift_ratio"] == pytest.approx(shift.mean().item(), abs=1e-12)
        floored = (shift < 0.7).double().mean().item()
        assert metrics["policy/router_shift_floored_fraction"] == pytest.approx(floored) and 0 < floored < 1
        # What is reported of the ratio itself is the policy's.
        plain = metrics_of(policy_loss(tokens_of(rows), policy_objective(loss_config()), ALONE))
        assert metrics["policy/ratio_mean"] == plain["policy/ratio_mean"]


@pytest.mark.parametrize("tau", [0.01, 0.5])
def test_kimi_k2_regresses_the_log_ratio_of_the_sequence_on_the_advantage(tau):
    def closed_form(response):
        log_ratio = (response["logprobs"] - response["old_logprobs"]).sum()
        return (response["advantages"][0] - tau * log_ratio) ** 2

    config = loss_config(kind="kimi_k2", tau=tau)
    same(batch(), lambda rows: loss_of(rows, config), lambda rows: over_sequences(rows, closed_form))


def test_the_gradient_of_kimi_k2_is_that_of_its_policy_gradient_form():
    tau = 0.1

    def surrogate(response):
        log_ratio = (response["logprobs"] - response["old_logprobs"]).sum()
        return -2 * tau * (response["advantages"][0] * response["logprobs"].sum() - tau / 2 * log_ratio**2)

    rows = batch()
    _, (gradient, _) = with_gradient(rows, lambda rows: loss_of(rows, loss_config(kind="kimi_k2", tau=tau)))
    _, (wanted, _) = with_gradient(rows, lambda rows: over_sequences(rows, surrogate))
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


def test_cispo_weighs_the_logprob_by_the_clipped_ratio():
    def closed_form(response):
        ratio = torch.exp(response["logprobs"] - response["old_logprobs"]).detach()
        return -ratio.clamp(0.9, 1.1) * response["advantages"] * response["logprobs"]

    config = loss_config(kind="cispo", clip_low=0.1, clip_high=0.1)
    same(
        batch(),
        lambda rows: loss_of(rows, config),
        lambda rows: torch.cat([closed_form(response) for response in responses(rows)]).mean(),
    )


KL = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: torch.exp(d) - d - 1}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.05, 2.0])
def test_dppo_masks_tokens_whose_probability_moved_far_with_the_advantage(spread, seed):
    """verl's form (weights without gradient, capped) of arXiv 2602.04879, equation by equation."""

    def closed_form(response):
        new, old, advantage = response["logprobs"], response["old_logprobs"], response["advantages"]
        change = new.exp() - old.exp()
        far = ((change > 0.02) & (advantage > 0)) | ((change < -0.03) & (advantage < 0))
        weight = (new - old).exp().clamp(max=1.5).detach()
        value = -weight * advantage
        return (value + torch.where(far, 0.0, value.detach() * (new - new.detach()))).mean()

    rows = batch(spread, seed)
    config = loss_config(kind="dppo_tv", clip_low=0.03, clip_high=0.02, ratio_limit=1.5)
    same(rows, lambda rows: loss_of(rows, config), lambda rows: over_sequences(rows, closed_form))
    result = policy_loss(tokens_of(rows), policy_objective(config), ALONE)
    changes = torch.cat([response["logprobs"].exp() - response["old_logprobs"].exp() for response in responses(rows)])
    advantages = torch.cat([response["advantages"] for response in responses(rows)])
    assert result.sums["clipped_high"] == ((changes > 0.02) & (advantages > 0)).sum()
    assert result.sums["clipped_low"] == ((changes < -0.03) & (advantages < 0)).sum()


@pytest.mark.parametrize("spread", [0.02, 1.0])
def test_sapo_gates_ratios_softly_with_a_temperature_for_each_side(spread):
    def closed_form(response):
        ratio = (response["logprobs"] - response["old_logprobs"]).exp()
        advantage = response["advantages"]
        tau = torch.full_like(advantage, 1.05).masked_fill(advantage > 0, 1.0)
        return -(4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage).mean()

    same(
        batch(spread),
        lambda rows: loss_of(rows, loss_config(kind="sapo")),
        lambda rows: over_sequences(rows, closed_form),
    )


@pytest.mark.parametrize("kind", ["grpo", "gspo", "sapo"])
def test_bad_completions_that_the_policy_has_left_are_masked_whole(kind):
    """DeepSeek-V3.2's mask: a sequence with A < 0 and a mean log(engine / policy) above delta leaves the sum."""
    rows, delta = batch(0.5, seed=2), 0.05
    masked = []

    def closed_form(response):
        gap = (response["rollout_logprobs"] - response["logprobs"]).mean().item()
        masked.append(gap > delta and response["advantages"][0].item() < 0)
        value = {
            "grpo": lambda: grpo_token(response).mean(),
            "gspo": lambda: gspo_sequence(response, 0.2, 0.2),
            "sapo": lambda: (
                -(
                    torch.sigmoid(tau * ((response["logprobs"] - response["old_logprobs"]).exp() - 1))
                    * (4 / tau)
                    * response["advantages"]
                ).mean()
            ),
        }
        tau = 1.0 if response["advantages"][0] > 0 else 1.05
        return value[kind]() * (0.0 if masked[-1] else 1.0)

    clip = {} if kind == "sapo" else {"clip_low": 0.2, "clip_high": 0.2}
    config = loss_config(kind=kind, off_policy_mask=delta, **clip)
    same(rows, lambda rows: loss_of(rows, config), lambda rows: over_sequences(rows, closed_form))
    assert 0 < sum(masked) < len(masked)
    lengths = [len(response["logprobs"]) for response in responses(rows)]
    result = policy_loss(tokens_of(rows), policy_objective(config), ALONE)
    assert result.sums["correction_masked"] == sum(
        length for length, is_masked in zip(lengths, masked, strict=False) if is_masked
    )


def test_a_kl_to_the_old_policy_is_kimi_k25s_square_of_the_log_ratio():
    rows = batch(0.3)
    config = loss_config(kl_to="old", kl_coeff=2e-3, kl_estimator="k2")

    def closed_form(response):
        log_ratio = response["logprobs"] - response["old_logprobs"]
        return (grpo_token(response) + 1e-3 * log_ratio.square()).mean()

    same(rows, lambda rows: loss_of(rows, config), lambda rows: over_sequences(rows, closed_form))
    assert not config.has_reference


@pytest.mark.parametrize("gradient", ["estimator", "k2"])
@pytest.mark.parametrize("estimator", KL)
def test_kl_has_the_value_of_its_estimator_and_the_named_gradient(estimator, gradient):
    config = loss_config(kl_coeff=0.3, kl_estimator=estimator, kl_gradient=gradient)
    rows = batch()

    def penalty(chosen):
        def of(response):
            kl = KL[chosen](response["reference_logprobs"] - response["logprobs"])
            return (grpo_token(response) + 0.3 * kl).mean()

        return lambda rows: over_sequences(rows, of)

    value, (got, _) = with_gradient(rows, lambda rows: loss_of(rows, config))
    assert abs(value - with_gradient(rows, penalty(estimator))[0]) <= 1e-9
    wanted = with_gradient(rows, penalty(estimator if gradient == "estimator" else "k2"))[1][0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_kl_in_the_reward_leaves_the_loss_alone():
    rows = batch()
    in_reward = loss_config(kl_coeff=0.3, kl_in="reward")
    assert loss_of(rows, in_reward) == loss_of(rows, loss_config())


@pytest.mark.parametrize("kind", KINDS)
def test_an_entropy_bonus_is_a_mean_like_the_loss(kind):
    rows = batch()
    _, (_, gradient) = with_gradient(rows, lambda rows: loss_of(rows, loss_config(kind=kind, entropy_coeff=0.2)))

    def bonus(rows):
        entropies = [response["entropy"] for response in responses(rows)]
        if kind == "cispo":
            return -0.2 * torch.cat(entropies).mean()
        return -0.2 * torch.stack([entropy.mean() for entropy in entropies]).mean()

    torch.testing.assert_close(gradient, with_gradient(rows, bonus)[1][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "mismatch"),
    [
        ("grpo", "truncate"),
        ("grpo", "mask"),
        ("grpo", "sequence_truncate"),
        ("grpo", "sequence_mask"),
        ("gspo", "sequence_truncate"),
        ("gspo", "sequence_mask"),
    ],
)
def test_tokens_are_weighted_for_the_engine_that_sampled_them(kind, mismatch):
    low, high = (0.9, 1.05) if "sequence" in mismatch else (0.8, 1.2)

    def closed_form(response):
        loss = grpo_token(response) if kind == "grpo" else gspo_sequence(response, 0.05, 0.07)
        log_weight = response["old_logprobs"] - response["rollout_logprobs"]
        weight = torch.exp(log_weight.mean() if "sequence" in mismatch else log_weight)
        if "mask" in mismatch:
            return (loss * weight * ((weight >= low) & (weight <= high))).mean()
        return (loss * weight.clamp(max=high)).mean()

    clip = {} if kind == "grpo" else {"clip_low": 0.05, "clip_high": 0.07}
    config = loss_config(
        kind=kind, importance_sampling=mismatch, importance_sampling_low=low, importance_sampling_high=high, **clip
    )
    same(batch(), lambda rows: loss_of(rows, config), lambda rows: over_sequences(rows, closed_form))


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_and_their_order_change_nothing(kind):
    config = loss_config(kind=kind, kl_coeff=0.1, entropy_coeff=0.1)
    rows = batch()

    def in_parts(*parts):
        def loss(rows):
            results = [
                policy_loss(tokens_of(rows, config.aggregation_in_use, sequences=part), policy_objective(config), ALONE)
                for part in parts
            ]
            return sum(result.loss for result in results) / sum(result.count for result in results)

        return with_gradient(rows, loss)

    whole, gradients = in_parts([0, 1, 2, 3, 4, 5, 6])
    for parts in ([[0], [1], [2], [3], [4], [5], [6]], [[6, 2, 4], [5, 0], [3, 1]]):
        value, part_gradients = in_parts(*parts)
        assert value.item() == pytest.approx(whole.item(), rel=1e-13)
        torch.testing.assert_close(part_gradients, gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_on_fresh_completions_ratios_are_one_and_the_kl_to_an_equal_reference_zero(kind):
    rows = batch(spread=0.0)
    rows["reference_logprobs"] = rows["logprobs"]
    result = policy_loss(tokens_of(rows), policy_objective(loss_config(kind=kind, kl_coeff=0.1)), ALONE)
    metrics = reduced(update_metrics(numbers(result.sums), numbers(result.maxima)))
    assert metrics["policy/ratio_mean"] == 1
    exact = ("ratio_variance", "log_ratio_max", "log_ratio_min", "kl_old_nats", "kl_reference_nats")
    assert [metrics[f"policy/{name}"] for name in exact] == [0] * 5
    assert metrics["policy/clip_ratio_low"] == metrics["policy/clip_ratio_high"] == 0


def numbers(tensors):
    return {name: float(value) for name, value in tensors.items()}


def metrics_of(result):
    return reduced(update_metrics(numbers(result.sums), numbers(result.maxima)))


@pytest.mark.parametrize("kind", ["grpo", "gspo_token", "cispo"])
def test_metrics_equal_counting_by_hand(kind):
    rows = batch(0.4)
    config = loss_config(
        kind=kind, clip_low=0.1, clip_high=0.15, importance_sampling="mask", importance_sampling_low=0.8
    )
    result = policy_loss(tokens_of(rows, config.aggregation_in_use), policy_objective(config), ALONE)
    got = reduced(update_metrics(numbers(result.sums), numbers(result.maxima)))
    ratios, low, high, kl, reference, mismatch = [], [], [], [], [], []
    for response in responses(rows):
        log_ratio = response["logprobs"] - response["old_logprobs"]
        compared = log_ratio.mean().expand_as(log_ratio).exp() if kind == "gspo_token" else log_ratio.exp()
        good, bad = response["advantages"] > 0, response["advantages"] < 0
        low.append((compared < 0.9) & (bad | (kind == "cispo")))
        high.append((compared > 1.15) & (good | (kind == "cispo")))
        ratios.append(log_ratio.exp())
        kl.append(log_ratio.exp() - 1 - log_ratio)
        reference.append(KL["k3"](response["reference_logprobs"] - response["logprobs"]))
        mismatch.append(response["old_logprobs"] - response["rollout_logprobs"])
    ratio, gap = torch.cat(ratios), torch.cat(mismatch)
    wanted = {
        "policy/ratio_mean": ratio.mean(),
        "policy/ratio_variance": ratio.var(correction=0),
        "policy/log_ratio_max": ratio.log().max(),
        "policy/log_ratio_min": ratio.log().min(),
        "policy/kl_old_nats": torch.cat(kl).mean(),
        "policy/kl_reference_nats": torch.cat(reference).mean(),
        "policy/entropy_nats": rows["entropy"][rows["mask"]].mean(),
        "policy/clip_ratio_low": torch.cat(low).double().mean(),
        "policy/clip_ratio_high": torch.cat(high).double().mean(),
        "policy/clip_ratio_low_sequences": tensor([x.any() for x in low]).double().mean(),
        "policy/clip_ratio_high_sequences": tensor([x.any() for x in high]).double().mean(),
        "rollout/mismatch_kl_nats": (gap.exp() - 1 - gap).mean(),
        "rollout/mismatch_max": gap.abs().max(),
        "rollout/importance_sampling_masked_fraction": ((gap.exp() < 0.8) | (gap.exp() > 2.0)).double().mean(),
    }
    assert wanted["policy/clip_ratio_low"] > 0 < wanted["policy/clip_ratio_high"]
    assert {name: got[name] for name in wanted} == pytest.approx(
        {name: value.item() for name, value in wanted.items()}, abs=1e-12
    )
    assert got["policy/loss"] == pytest.approx(float(result.loss / result.count))


def test_a_microbatch_without_a_trained_token_is_zero_and_finite():
    rows = batch()
    rows["mask"] = torch.zeros_like(rows["mask"])
    rows["mask"][0] = True
    for kind in KINDS:
        value, gradients = with_gradient(
            rows,
            lambda rows, kind=kind: (
                policy_loss(tokens_of(rows, sequences=[1, 2]), policy_objective(loss_config(kind=kind)), ALONE).loss
            ),
        )
        assert value == 0
        assert gradients[0].abs().max() == 0


OWN_LOSS = """
import torch
from mcore_rl.rl.step.losses import TokenLoss

def clipped(tokens, config, cp):
    ratio_T = tokens.log_ratio_T.exp()
    bounded_T = ratio_T.clamp(1 - config.clip.low, 1 + config.clip.high)
    loss_T = -torch.minimum(ratio_T * tokens.advantages_T, bounded_T * tokens.advantages_T)
    low_T = (ratio_T < 1 - config.clip.low) & (tokens.advantages_T < 0)
    return TokenLoss(loss_T, low_T, (ratio_T > 1 + config.clip.high) & (tokens.advantages_T > 0))
"""


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_a_loss_of_the_users_own_is_treated_like_the_one_it_copies(tmp_path, monkeypatch, aggregation):
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"aggregation": aggregation, "kl_coeff": 0.1, "entropy_coeff": 0.01, "importance_sampling": "truncate"}
    rows = batch()
    named, own = (loss_config(kind=kind, **options) for kind in ("grpo", "own_loss:clipped"))
    same(rows, lambda rows: loss_of(rows, own), lambda rows: loss_of(rows, named), tolerance=0)
    of_named, of_own = (policy_loss(tokens_of(rows), policy_objective(config), ALONE).sums for config in (named, own))
    assert of_named == of_own


FAR = 100.0
"""Nats; e^100 overflows in float32 and is finite in float64, where autograd on the paper's formula is an oracle."""
BROKEN = {
    "a clipped ratio": ({"logprobs": FAR}, 1),
    "a ratio near zero": ({"logprobs": -FAR}, 1),
    "a ratio near zero of a bad completion": ({"logprobs": -FAR}, -1),
}


def float32(rows):
    return {name: values if name == "mask" else values.float() for name, values in rows.items()}


def broken(changes, sign=1):
    """A batch of advantages of one sign, in which one trained token has other logprobs by `changes`."""
    rows = batch(0.1)
    rows["advantages"] = sign * rows["advantages"].abs()
    for name, change in changes.items():
        rows[name] = rows[name].clone()
        rows[name][2, CUT + 3] += change
    return rows


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
def test_a_log_ratio_that_overflows_float32_has_the_value_and_gradient_of_float64(kind, case):
    changes, sign = BROKEN[case]
    rows = broken(changes, sign)

    def cispo(response):
        ratio = torch.exp(response["logprobs"] - response["old_logprobs"]).detach()
        return -ratio.clamp(0.0, 1.28) * response["advantages"] * response["logprobs"]

    forms = {
        "grpo": lambda rows: over_sequences(rows, lambda response: grpo_token(response).mean()),
        "gspo": lambda rows: over_sequences(rows, lambda response: gspo_sequence(response, 3e-4, 4e-4)),
        "cispo": lambda rows: torch.cat([cispo(response) for response in responses(rows)]).mean(),
    }
    wanted, (wanted_gradient, _) = with_gradient(rows, forms[kind])
    value, (gradient, _) = with_gradient(float32(rows), lambda rows: loss_of(rows, loss_config(kind=kind)))
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", [FAR, -FAR])
@pytest.mark.parametrize("estimator", KL)
def test_a_kl_that_overflows_float32_is_finite_and_beyond_e20_without_gradient(estimator, side):
    rows = broken({"reference_logprobs": side})
    config = loss_config(kl_coeff=0.3, kl_estimator=estimator)
    here = (2, CUT + 3)

    def difference(rows):
        d = rows["reference_logprobs"] - rows["logprobs"]
        return torch.where(d > 20.0, 20.0, d) if estimator == "k3" else d

    def closed_form(rows):
        kl = rows | {"kl": KL[estimator](difference(rows))}
        return over_sequences(kl, lambda response: (grpo_token(response) + 0.3 * response["kl"]).mean())

    wanted, (wanted_gradient, _) = with_gradient(rows, closed_form)
    value, (gradient, _) = with_gradient(float32(rows), lambda rows: loss_of(rows, config))
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-4, atol=1e-6)
    if estimator == "k3" and side < 0:
        assert gradient[here] > 0, "the pull to the reference stays where the policy is far above it"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["rollout_logprobs", "old_logprobs", "logprobs", "reference_logprobs", "all"])
def test_a_probability_of_zero_costs_its_own_token_only_and_is_counted(kind, sign, name):
    """The other tokens' gradients are those of a batch in which this token's log-ratio is 20 nats, the limit."""
    names = ["rollout_logprobs", "old_logprobs", "logprobs", "reference_logprobs"] if name == "all" else [name]
    rows = float32(broken(dict.fromkeys(names, -torch.inf), sign))
    options = {} if kind == "kimi_k2" else {"importance_sampling": "sequence_truncate"}
    config = loss_config(kind=kind, kl_coeff=0.1, **options)
    value, (gradient, _) = with_gradient(rows, lambda rows: loss_of(rows, config))
    assert value.isfinite() and gradient.isfinite().all()
    near = broken({}, sign)
    here = (2, CUT + 3)
    # The values that stand for the limit: the same differences to what is finite.
    others = {"old_logprobs": "logprobs", "logprobs": "old_logprobs", "rollout_logprobs": "old_logprobs"}
    if len(names) == 1 and name in ("old_logprobs", "rollout_logprobs"):
        near[name][here] = near[others[name]][here] - 20.0
        if name == "old_logprobs":
            near["rollout_logprobs"][here] = near["old_logprobs"][here] + 20.0
        _, (wanted, _) = with_gradient(near, lambda rows: loss_of(rows, config))
        wanted[here] = gradient[here].double()
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-6)
    result = policy_loss(tokens_of(rows, config.aggregation_in_use), policy_objective(config), ALONE)
    metrics = reduced(update_metrics(numbers(result.sums), numbers(result.maxima)))
    assert metrics["policy/clamped_fraction"] == pytest.approx(1 / int(rows["mask"].sum()))
    assert 0 <= metrics["policy/ratio_variance"] < 1e18
    assert all(abs(value) < 1e18 for value in metrics.values())


def test_the_mismatch_of_current_tokens_leaves_out_those_that_older_weights_sampled():
    rows = batch()
    is_stale_T = torch.arange(rows["mask"].numel()) % 3 == 0
    result = policy_loss(replace(tokens_of(rows), is_stale_T=is_stale_T), policy_objective(loss_config()), ALONE)
    metrics = reduced(staleness_metrics(numbers(result.sums)))
    mask = rows["mask"].flatten()
    difference = (rows["old_logprobs"] - rows["rollout_logprobs"]).flatten()[mask & ~is_stale_T]
    assert metrics == {
        "rollout/stale_fraction": pytest.approx(int((mask & is_stale_T).sum()) / int(mask.sum())),
        "rollout/mismatch_kl_current_nats": pytest.approx(float((difference.exp() - 1 - difference).mean())),
    }
    result = policy_loss(replace(tokens_of(rows), is_stale_T=mask), policy_objective(loss_config()), ALONE)
    assert reduced(staleness_metrics(numbers(result.sums))) == {"rollout/stale_fraction": 1}


def test_advantages_are_summed_by_size_over_trained_tokens_so_that_0_means_that_there_is_none():
    rows = batch()
    total = sum(float(response["advantages"].abs().sum()) for response in responses(rows))
    assert policy_loss(tokens_of(rows), policy_objective(loss_config()), ALONE).sums["advantages_abs"] == pytest.approx(
        total
    )
    # The value outside of completions is no advantage.
    rows["advantages"] = rows["advantages"].masked_fill(rows["mask"], 0.0)
    assert policy_loss(tokens_of(rows), policy_objective(loss_config()), ALONE).sums["advantages_abs"] == 0


def test_nothing_is_clamped_in_an_ordinary_batch():
    result = policy_loss(tokens_of(batch(2.0)), policy_objective(loss_config(kl_coeff=0.1)), ALONE)
    assert result.sums["clamped"] == 0


def test_a_completion_without_a_trained_token_leaves_the_divisor_of_sequence_means():
    rows = batch()
    rows["mask"] = rows["mask"].clone()
    rows["mask"][4] = False
    trained = [response for response in responses(rows) if len(response["logprobs"])]
    assert len(trained) == len(rows["mask"]) - 1
    wanted = torch.stack([grpo_token(response).mean() for response in trained]).mean()
    assert float(loss_of(rows, loss_config())) == pytest.approx(float(wanted), abs=1e-12)
