"""Losses on pairs and their gradients against closed forms in float64, and against TRL's formulas."""

import math
from dataclasses import replace

import numpy
import pytest
import torch
from torch.nn.functional import logsigmoid, relu

from mcore_rl.config.preferences import DPOSection
from mcore_rl.data.packing import PackingLimits
from mcore_rl.data.preference_batches import pack_groups
from mcore_rl.data.preferences import Preferences
from mcore_rl.megatron.mesh import Axis
from mcore_rl.train.preference_losses import DPOHead
from mcore_rl.train.preferences import AnswerLogprobHead, localize_preferences

VOCAB, PADDED_VOCAB = 23, 32
ALONE, CPU = Axis(None, 0, 1), torch.device("cpu")
SHAPES = [(3, 5), (3, 1), (1, 7), (1, 2), (4, 1), (4, 3), (4, 6)]
"""Prompt and answer tokens of each sequence: two pairs, one a tie, and a ranking of three."""
PAIRS = [(0, 1), (2, 3), (4, 5), (4, 6), (5, 6)]
MARGINS = [0.5, 0.0, 0.0, 2.0, 1.25]
PROBABILITIES = [1.0, 0.5, 1.0, 1.0, 1.0]
KINDS = {
    "sigmoid": DPOSection(),
    "cdpo": DPOSection(label_smoothing=0.2, beta=0.3),
    "odpo": DPOSection(margin_coeff=0.7, beta=0.3),
    "length_normalised": DPOSection(length_normalised=True, beta=2.0, target_margin=0.4),
    "rpo": DPOSection(nll_coeff=0.8),
    "robust": DPOSection(loss="robust", label_smoothing=0.1, beta=0.2),
    "ipo": DPOSection(loss="ipo", beta=0.2),
    "ipo_mean": DPOSection(loss="ipo", beta=0.7, length_normalised=True),
    "hinge": DPOSection(loss="hinge", beta=0.15),
    "simpo": DPOSection(loss="simpo", beta=2.0, target_margin=0.5),
    "cpo": DPOSection(loss="simpo", length_normalised=False, nll_coeff=1.0),
    "orpo": DPOSection(loss="orpo", beta=0.4),
    "orpo_alone": DPOSection(loss="orpo", beta=0.4, nll_coeff=0.0, label_smoothing=0.1),
}


def preferences() -> Preferences:
    generator = numpy.random.default_rng(3)
    lengths = [sum(shape) for shape in SHAPES]
    is_answer = [place >= prompt for prompt, answer in SHAPES for place in range(prompt + answer)]
    return Preferences(
        ids_T=generator.integers(0, VOCAB, sum(lengths)).astype(numpy.int32),
        is_answer_T=numpy.array(is_answer),
        starts_N=numpy.cumsum([0, *lengths]),
        sequence_starts_G=numpy.array([0, 2, 4, 7]),
        pair_starts_G=numpy.array([0, 1, 2, 5]),
        pairs_P2=numpy.array(PAIRS),
        margins_P=numpy.array(MARGINS),
        probabilities_P=numpy.array(PROBABILITIES),
        source_sizes=(3,),
        num_skipped=0,
        num_skipped_ties=0,
    )


REFERENCE = -torch.rand(len(SHAPES), generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 20


def packed_microbatch(uses_reference):
    limits = PackingLimits(max_tokens=64, multiple=8, sample_multiple=2)
    packed = pack_groups(preferences(), [2, 0, 1], limits, pad_id=0)
    return localize_preferences(packed, ALONE, CPU, REFERENCE if uses_reference else None)


def sequence_rows(logits_TV, microbatch):
    """For each sequence of the data, by index: logprobs of all ids at the positions that predict its answer, the ids
    of the answer, and those positions.
    """
    data = preferences()
    bounds = microbatch.inputs.packed.lengths
    found, begin = {}, 0
    for n, span in zip(microbatch.sequences, bounds, strict=False):
        prompt, answer = SHAPES[n]
        positions = range(begin + prompt - 1, begin + prompt + answer - 1)
        ids = data.ids_T[data.starts_N[n] + prompt : data.starts_N[n + 1]].tolist()
        found[n] = (logits_TV[list(positions), :VOCAB].log_softmax(-1), ids, list(positions))
        begin += span
    return found


def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def closed_form(c, lc, lr, fc, fr, nc, nr, margin, p):
    """The loss of a pair from logprobs l and those of the reference f, and its derivatives by the two l."""
    q = (p - c.label_smoothing) / (1 - 2 * c.label_smoothing)
    if c.loss != "robust":
        q = p + c.label_smoothing - 2 * p * c.label_smoothing
    mc, mr = (nc, nr) if c.is_length_normalised else (1, 1)
    nll = c.nll_weight
    if c.loss == "orpo":
        xc, xr = lc / nc, lr / nr
        odds = math.log(math.exp(xc) / (1 - math.exp(xc))) - math.log(math.exp(xr) / (1 - math.exp(xr)))
        loss = c.beta * (q * softplus(-odds) + (1 - q) * softplus(odds))
        slope = c.beta * (-q * sigmoid(-odds) + (1 - q) * sigmoid(odds))
        dc, dr = slope / (1 - math.exp(xc)) / nc, -slope / (1 - math.exp(xr)) / nr
    elif c.loss == "ipo":
        h, t = (lc - fc) / mc - (lr - fr) / mr, 1 / (2 * c.beta)
        loss = q * (h - t) ** 2 + (1 - q) * (h + t) ** 2
        slope = 2 * q * (h - t) + 2 * (1 - q) * (h + t)
        dc, dr = slope / mc, -slope / mr
    else:
        d = c.beta * ((lc - fc) / mc - (lr - fr) / mr)
        t = c.target_margin + c.margin_coeff * margin
        if c.loss == "hinge":
            loss = q * max(0.0, 1 - d + t) + (1 - q) * max(0.0, 1 + d + t)
            slope = -q * (d - t < 1) + (1 - q) * (-d - t < 1)
        else:
            loss = q * softplus(t - d) + (1 - q) * softplus(t + d)
            slope = -q * sigmoid(t - d) + (1 - q) * sigmoid(t + d)
        dc, dr = c.beta * slope / mc, -c.beta * slope / mr
    return loss - nll * lc / nc, dc - nll / nc, dr


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_closed_forms(kind, one_rank):
    config = KINDS[kind]
    microbatch = packed_microbatch(config.uses_reference)
    generator = torch.Generator().manual_seed(5)
    logits_1TV = 2 * torch.randn(1, microbatch.shape[1], PADDED_VOCAB, generator=generator, dtype=torch.float64)
    logits_1TV.requires_grad_()
    head = DPOHead(AnswerLogprobHead(one_rank, VOCAB, chunk_tokens=4), one_rank, config)
    result = head(microbatch, logits_1TV)
    result.loss.backward()
    rows = sequence_rows(logits_1TV.detach()[0], microbatch)
    sums = {n: sum(row[t, token].item() for t, token in enumerate(ids)) for n, (row, ids, _) in rows.items()}
    reference = REFERENCE if config.uses_reference else torch.zeros(len(SHAPES))
    total, slopes = 0.0, dict.fromkeys(rows, 0.0)
    for (chosen, rejected), margin, p in zip(PAIRS, MARGINS, PROBABILITIES, strict=True):
        logprobs, references = (sums[chosen], sums[rejected]), (reference[chosen].item(), reference[rejected].item())
        lengths = SHAPES[chosen][1], SHAPES[rejected][1]
        loss, dc, dr = closed_form(config, *logprobs, *references, *lengths, margin, p)
        total += loss
        slopes[chosen] += dc
        slopes[rejected] += dr
    assert result.loss.item() == pytest.approx(total, abs=1e-9)
    wanted = torch.zeros_like(logits_1TV)
    for n, (row, ids, positions) in rows.items():
        # The derivative of a logprob by the logits is 1 at the token, less all probabilities.
        wanted[0, positions, :VOCAB] = -slopes[n] * row.exp()
        for t, token in zip(positions, ids, strict=True):
            wanted[0, t, token] += slopes[n]
    torch.testing.assert_close(logits_1TV.grad, wanted, rtol=0, atol=1e-9)
    assert head.count(microbatch) == len(PAIRS)


def trl_losses(kind, beta, gamma, smoothing, chosen, rejected, ref_chosen, ref_rejected):
    """As TRL's DPOTrainer.dpo_loss, CPOTrainer.cpo_loss and ORPOTrainer.odds_ratio_loss name and order the terms."""
    logratios, ref_logratios = chosen - rejected, ref_chosen - ref_rejected
    logits = logratios - ref_logratios
    if kind == "sigmoid":
        return -logsigmoid(beta * logits) * (1 - smoothing) - logsigmoid(-beta * logits) * smoothing
    if kind == "robust":
        losses = -logsigmoid(beta * logits) * (1 - smoothing) + logsigmoid(-beta * logits) * smoothing
        return losses / (1 - 2 * smoothing)
    if kind == "hinge":
        return relu(1 - beta * logits)
    if kind == "ipo":
        return (logits - 1 / (2 * beta)) ** 2
    if kind == "simpo":
        return -logsigmoid(beta * (logratios - gamma / beta))
    log_odds = logratios - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -beta * logsigmoid(log_odds)


@pytest.mark.parametrize(
    ("settings", "is_mean"),
    [
        ({"loss": "sigmoid", "beta": 0.1}, False),
        ({"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.3}, False),
        ({"loss": "robust", "beta": 0.1, "label_smoothing": 0.3}, False),
        ({"loss": "hinge", "beta": 0.05}, False),
        ({"loss": "ipo", "beta": 0.1, "length_normalised": True}, True),
        ({"loss": "simpo", "beta": 2.0, "target_margin": 1.0}, True),
        ({"loss": "orpo", "beta": 0.1, "nll_coeff": 0.0}, True),
    ],
)
def test_losses_are_those_of_trl(settings, is_mean, one_rank):
    config = DPOSection(**settings)
    microbatch = packed_microbatch(config.uses_reference)
    microbatch = replace(microbatch, probabilities_P=torch.ones(len(PAIRS)))
    generator = torch.Generator().manual_seed(6)
    logits_1TV = torch.randn(1, microbatch.shape[1], PADDED_VOCAB, generator=generator, dtype=torch.float64)
    head = DPOHead(AnswerLogprobHead(one_rank, VOCAB, chunk_tokens=64), one_rank, config)
    sums = head(microbatch, logits_1TV).outputs
    logps = torch.zeros(len(SHAPES), dtype=torch.float64)
    for n, (row, ids, _) in sequence_rows(logits_1TV[0], microbatch).items():
        logps[n] = row[range(len(ids)), ids].sum()
    lengths = torch.tensor([answer for _, answer in SHAPES]) if is_mean else torch.ones(len(SHAPES))
    ours, ref = logps / lengths, REFERENCE / lengths
    chosen, rejected = torch.tensor(PAIRS).unbind(1)
    options = (config.loss, config.beta, config.target_margin, config.label_smoothing)
    losses = trl_losses(*options, ours[chosen], ours[rejected], ref[chosen], ref[rejected])
    assert sums["loss"].item() == pytest.approx(losses.sum().item(), abs=1e-9)
    rewards = config.beta * (ours - ref if config.uses_reference else ours)
    assert sums["chosen_reward"].item() == pytest.approx(rewards[chosen].sum().item(), abs=1e-9)
    assert sums["rejected_reward"].item() == pytest.approx(rewards[rejected].sum().item(), abs=1e-9)
    assert sums["right"].item() == (rewards[chosen] > rewards[rejected]).sum().item()
    found = head.metrics({name: float(value) for name, value in sums.items()})
    metrics = {metric.name: metric.value / metric.count for metric in found}
    margin = (rewards[chosen] - rewards[rejected]).mean().item()
    assert metrics["pairs/reward_margin"] == pytest.approx(margin, abs=1e-9)
    assert metrics["pairs/chosen_logprob"] == pytest.approx(logps[chosen].mean().item(), abs=1e-9)


def test_a_tie_has_no_right_order_and_pulls_rewards_together(one_rank):
    """At equal rewards its gradient is zero, and it counts in no accuracy."""
    microbatch = packed_microbatch(uses_reference=True)
    tied = replace(microbatch, probabilities_P=torch.full((len(PAIRS),), 0.5))
    logits_1TV = torch.zeros(1, microbatch.shape[1], PADDED_VOCAB, dtype=torch.float64, requires_grad=True)
    uniform_N = torch.tensor([-answer * math.log(VOCAB) for _, answer in SHAPES], dtype=torch.float64)
    equal = replace(tied, reference_logprobs_N=uniform_N[list(tied.sequences)])
    head = DPOHead(AnswerLogprobHead(one_rank, VOCAB, chunk_tokens=64), one_rank, DPOSection())
    result = head(equal, logits_1TV)
    result.loss.backward()
    assert logits_1TV.grad.abs().max() < 1e-12
    assert result.outputs["decided"] == 0
    sums = {name: float(value) for name, value in result.outputs.items()}
    assert "pairs/accuracy" not in {metric.name for metric in head.metrics(sums)}


def test_a_microbatch_of_padding_has_a_loss_of_zero_with_a_gradient(one_rank):
    limits = PackingLimits(max_tokens=64, multiple=8, sample_multiple=2)
    empty = localize_preferences(pack_groups(preferences(), [], limits, pad_id=0), ALONE, CPU, REFERENCE)
    logits_1TV = torch.randn(1, empty.shape[1], PADDED_VOCAB, requires_grad=True)
    head = DPOHead(AnswerLogprobHead(one_rank, VOCAB, chunk_tokens=64), one_rank, DPOSection())
    result = head(empty, logits_1TV)
    result.loss.backward()
    assert result.loss == 0 and not logits_1TV.grad.any() and result.count == 0


def test_an_answer_of_probability_one_has_finite_odds(one_rank):
    microbatch = packed_microbatch(uses_reference=False)
    logits_1TV = torch.zeros(1, microbatch.shape[1], PADDED_VOCAB)
    for _, ids, positions in sequence_rows(logits_1TV[0], microbatch).values():
        logits_1TV[0, positions, ids] = 80.0
    logits_1TV.requires_grad_()
    head = DPOHead(AnswerLogprobHead(one_rank, VOCAB, chunk_tokens=64), one_rank, DPOSection(loss="orpo"))
    result = head(microbatch, logits_1TV)
    result.loss.backward()
    assert result.loss.isfinite() and logits_1TV.grad.isfinite().all()
