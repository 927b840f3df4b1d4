"""What a run can tell. METRICS is the documentation: a name that is not in it is refused."""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Reported: TypeAlias = "float | list[Reported]"


class Reduce(Enum):
    """How several values of one metric, each with its count, become the one that is told."""

    SUM = "sum of the values"
    MEAN = "sum of the values / sum of the counts"
    EXP_MEAN = "e to the MEAN"
    MAX = "largest value"
    MIN = "smallest value"
    LAST = "the latest value"


SUM, MEAN, EXP_MEAN, MAX, MIN, LAST = Reduce


class Row(NamedTuple):
    """A row of METRICS; the unit 1 is a pure number."""

    unit: str
    reduce: Reduce
    text: str


METRICS: dict[str, Row] = {
    "train/loss_nats": Row("nats/token", MEAN, "Next-token cross entropy; no balance or MTP loss in it."),
    "train/perplexity": Row("1", EXP_MEAN, "e to train/loss_nats; give it the same value and count."),
    "train/grad_norm": Row("1", MEAN, "Global L2 norm of the gradient, before clipping."),
    "train/lr": Row("1", LAST, "Learning rate."),
    "train/tokens_per_s_per_rank": Row("tokens/s", MEAN, "Trained tokens / (seconds * ranks)."),
    "train/model_tflops_per_rank": Row("TFLOP/s", MEAN, "Model FLOPs (plan/flops.py) / (seconds * ranks)."),
    "train/mfu": Row("1", MEAN, "Model FLOP/s of a rank over the peak of its device."),
    "train/step_s": Row("s", MEAN, "Wall time of a step."),
    "train/skipped_steps": Row("steps", LAST, "Steps so far whose update was left out: not finite."),
    "train/consumed_samples": Row("sequences", LAST, "Sequences read so far."),
    "train/consumed_tokens": Row("tokens", LAST, "Tokens trained on so far."),
    "train/global_batch": Row("sequences", LAST, "Sequences of a step."),
    "moe/aux_loss": Row("1", MEAN, "Balance loss before its coefficient, mean over layers; 1 is even."),
    "moe/z_loss": Row("1", MEAN, "Router z-loss before its coefficient, mean over layers."),
    "moe/load_max_over_mean": Row("1", MEAN, "Tokens of the busiest expert / mean; mean over layers."),
    "moe/load_entropy": Row("1", MEAN, "Entropy of the shares / log(experts), mean over layers; 1 is even."),
    "moe/dropped_tokens": Row("choices", SUM, "Choices beyond an expert's capacity, all layers."),
    "moe/dropped_fraction": Row("1", MEAN, "moe/dropped_tokens over all choices."),
    "moe/expert_load": Row("tokens", SUM, "Matrix: row = layer from 0 (zeros: dense), column = expert."),
    "moe/layer_NN/load_max_over_mean": Row("1", MEAN, "Of layer NN, from 0 as in parameter names."),
    "moe/layer_NN/load_entropy": Row("1", MEAN, "Of layer NN, from 0 as in parameter names."),
    "mtp/loss_nats": Row("nats/token", MEAN, "Cross entropy of the multi-token-prediction heads."),
    "mtp/load_max_over_mean": Row("1", MEAN, "As moe/load_max_over_mean, over the MTP layers."),
    "mtp/load_entropy": Row("1", MEAN, "As moe/load_entropy, over the MTP layers."),
    "mtp/dropped_tokens": Row("choices", SUM, "As moe/dropped_tokens, over the MTP layers."),
    "mtp/dropped_fraction": Row("1", MEAN, "As moe/dropped_fraction, over the MTP layers."),
    "mtp/expert_load": Row("tokens", SUM, "Matrix: row = MTP layer from 0, column = expert."),
    "mtp/layer_NN/load_max_over_mean": Row("1", MEAN, "Of MTP layer NN, counted from 0."),
    "mtp/layer_NN/load_entropy": Row("1", MEAN, "Of MTP layer NN, counted from 0."),
    "policy/loss": Row("1", MEAN, "What is minimised, aggregated as rl.loss says, with KL and entropy."),
    "policy/objective": Row("1", MEAN, "The same without KL and entropy."),
    "policy/entropy_nats": Row("nats/token", MEAN, "Of the next token over the whole vocabulary."),
    "policy/kl_old_nats": Row("nats/token", MEAN, "KL(old policy || policy), k3."),
    "policy/kl_reference_nats": Row("nats/token", MEAN, "KL(policy || reference), k3."),
    "policy/clipped_low_fraction": Row("1", MEAN, "Tokens whose ratio was clipped from below."),
    "policy/clipped_high_fraction": Row("1", MEAN, "Tokens whose ratio was clipped from above."),
    "policy/clipped_low_sequences_fraction": Row("1", MEAN, "Sequences with such a token."),
    "policy/clipped_high_sequences_fraction": Row("1", MEAN, "Sequences with such a token."),
    "policy/ratio_mean": Row("1", MEAN, "Policy / old policy, mean over tokens."),
    "policy/ratio_variance": Row("1", MEAN, "Of the ratio, over tokens."),
    "policy/log_ratio_max": Row("nats", MAX, "Log of the largest ratio."),
    "policy/log_ratio_min": Row("nats", MIN, "Log of the smallest ratio."),
    "rollout/mismatch_kl_nats": Row("nats/token", MEAN, "KL(engine || old policy), k3."),
    "rollout/mismatch_max": Row("nats", MAX, "Largest difference of engine's and trainer's logprobs."),
    "rollout/mismatch_dropped_fraction": Row("1", MEAN, "Tokens that rl.loss.mismatch masks."),
    "routes/changed_fraction": Row("1", MEAN, "Routes (token, layer, slot) not of the old policy (R3: engine)."),
    "routes/changed_tokens_fraction": Row("1", MEAN, "Tokens with such a route in any layer."),
    "routes/gate_mass_moved": Row("1", MEAN, "Share of the gates on such; mean over layers."),
    "routes/layer_NN/changed_fraction": Row("1", MEAN, "Of layer NN, from 0."),
    "routes/layer_NN/gate_mass_moved": Row("1", MEAN, "Of layer NN, from 0."),
    "routes/compared_tokens": Row("tokens", SUM, "Whose routes are known and were compared."),
    "routes/unknown_tokens": Row("tokens", SUM, "Routed live because no routes came (replay.missing)."),
    "rollout_routes/changed_fraction": Row("1", MEAN, "Routes (token, layer, slot) not of the engine."),
    "rollout_routes/changed_tokens_fraction": Row("1", MEAN, "Tokens with such a route in any layer."),
    "rollout_routes/gate_mass_moved": Row("1", MEAN, "Share of the gates on such; mean over layers."),
    "rollout_routes/layer_NN/changed_fraction": Row("1", MEAN, "Of layer NN, from 0."),
    "rollout_routes/layer_NN/gate_mass_moved": Row("1", MEAN, "Of layer NN, from 0."),
    "rollout_routes/compared_tokens": Row("tokens", SUM, "Whose routes are known and were compared."),
    "rollout_routes/unknown_tokens": Row("tokens", SUM, "Routed live because no routes came (replay.missing)."),
    "routes/cached_bytes": Row("bytes", LAST, "Routes held for replay, all ranks."),
    "reward/mean": Row("1", MEAN, "Weighted sum of the parts, mean over completions."),
    "reward/part/NAME": Row("1", MEAN, "Part NAME of rl.reward.parts before its weight; overlong: length."),
    "reward/solved_fraction": Row("1", MEAN, "Completions to which the first part gives 1 or more."),
    "reward/group_std": Row("1", MEAN, "Standard deviation (ddof 0) of a group's rewards, mean over groups."),
    "reward/groups_without_signal_fraction": Row("1", MEAN, "Groups whose rewards are all the same."),
    "reward/errors": Row("judgements", SUM, "Parts that gave no number; worth rl.reward.error_value."),
    "reward/errors_raised": Row("judgements", SUM, "Of them: the function raised."),
    "reward/errors_not_finite": Row("judgements", SUM, "Of them: NaN or infinite."),
    "reward/errors_bad_steps": Row("judgements", SUM, "Of them: no rising (end, value) within the text."),
    "reward/errors_timeout": Row("judgements", SUM, "Of them: longer than rl.reward.timeout_s."),
    "reward/errors_died": Row("judgements", SUM, "Of them: its process crashed."),
    "rl/step_s": Row("s", MEAN, "Wall time of a rollout batch with its updates."),
    "rl/rollouts": Row("rollouts", LAST, "Rollout batches learned from so far."),
    "rl/consumed_prompts": Row("prompts", LAST, "Prompts taken so far, unused ones too."),
    "rollout/completion_tokens": Row("tokens", MEAN, "Length of a completion."),
    "rollout/longest_completion_tokens": Row("tokens", MAX, "Length of the longest."),
    "rollout/prompt_tokens": Row("tokens", MEAN, "Length of a prompt."),
    "rollout/truncated_fraction": Row("1", MEAN, "Completions that reached rl.rollout.max_new_tokens."),
    "rollout/tokens_per_s_per_replica": Row("tokens/s", MEAN, "Completion tokens / (seconds * replicas)."),
    "rollout/refills": Row("rollouts", MEAN, "Further rollouts that dynamic sampling took, a step."),
    "rollout/unused_groups": Row("groups", MEAN, "Groups without signal, or too many, a step."),
    "eval/solved_fraction": Row("1", MEAN, "Held-out prompts' answers to which the first part gives 1."),
    "eval/reward": Row("1", MEAN, "Reward of the answers to held-out prompts."),
    "eval/completion_tokens": Row("tokens", MEAN, "Length of these answers."),
    "eval/truncated_fraction": Row("1", MEAN, "Of them, those that reached the longest length."),
    "eval/pass_at_K": Row("1", MEAN, "Chance that one of K answers to a held-out prompt is right."),
    "eval/loss_nats": Row("nats/token", MEAN, "train/loss_nats on the validation text."),
    "eval/perplexity": Row("1", EXP_MEAN, "e to eval/loss_nats."),
    "test/loss_nats": Row("nats/token", MEAN, "train/loss_nats on the test text, at the end."),
    "test/perplexity": Row("1", EXP_MEAN, "e to test/loss_nats."),
    "data/unigram_nats": Row("nats/token", LAST, "Entropy of the token frequencies: loss without context."),
    "data/examples": Row("conversations", LAST, "To train on."),
    "data/skipped_examples": Row("conversations", LAST, "Left out: longer than a row."),
    "data/prompts": Row("prompts", LAST, "To learn from; 0: a task that makes them without end."),
    "data/filled_fraction": Row("1", LAST, "Positions of packed rows that hold a token of an example."),
    "memory/resident_bytes": Row("bytes", LAST, "Main memory that the process holds."),
    "memory/peak_resident_bytes": Row("bytes", MAX, "The most it ever held."),
    "memory/device_bytes": Row("bytes", LAST, "Device memory in tensors."),
    "memory/peak_device_bytes": Row("bytes", MAX, "The most that was ever in tensors."),
    "memory/device_reserved_bytes": Row("bytes", LAST, "Device memory that the allocator holds."),
    "checkpoint/blocking_s": Row("s", LAST, "How long training stood still for a save."),
    "checkpoint/save_s": Row("s", LAST, "From the start of a save until the checkpoint was complete."),
    "checkpoint/load_s": Row("s", LAST, "Reading a checkpoint."),
    "checkpoint/bytes": Row("bytes", LAST, "Size of a checkpoint on disk."),
    "time/data_s": Row("s", MEAN, "Waiting for the batch, a step."),
    "time/forward_backward_s": Row("s", MEAN, "Forward and backward passes, a step."),
    "time/optimizer_s": Row("s", MEAN, "Gradient norm, update and gathering of parameters, a step."),
    "time/rollout_s": Row("s", MEAN, "Generation, a rollout batch."),
    "time/reward_s": Row("s", MEAN, "Judging, with waiting for other replicas, a rollout batch."),
    "time/old_logprobs_s": Row("s", MEAN, "The old policy's passes, a rollout batch."),
    "time/routes_s": Row("s", MEAN, "Replay around the passes: exchange, tapes, accounts, a rollout batch."),
    "time/reference_s": Row("s", MEAN, "The reference's passes, a rollout batch."),
    "time/eval_s": Row("s", LAST, "One evaluation."),
    "time/checkpoint_s": Row("s", LAST, "What a save took of the training loop."),
}  # fmt: skip


def row_of(name: str) -> Row:
    """The row of METRICS for `name`; a layer's number stands there as NN, a part of the reward as NAME."""
    key = re.sub(r"/layer_\d+/", "/layer_NN/", re.sub(r"^reward/part/.+", "reward/part/NAME", name))
    key = re.sub(r"^eval/pass_at_\d+$", "eval/pass_at_K", key)
    if key not in METRICS:
        near = difflib.get_close_matches(key, METRICS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"no metric is called {name!r}: add a row to METRICS in obs/metrics.py.{hint}")
    return METRICS[key]


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of a metric and what it counts: for a mean, `value` is the sum over `count` things.

    A tensor stays on its device, without its graph, until it is told: making a Metric waits for nothing.
    """

    name: str
    value: float | Tensor
    count: float | Tensor = 1.0

    def __post_init__(self) -> None:
        row_of(self.name)
        for field in ("value", "count"):
            if isinstance(number := getattr(self, field), Tensor):
                object.__setattr__(self, field, number.detach())

    @property
    def unit(self) -> str:
        """Unit, from METRICS."""
        return row_of(self.name).unit

    @property
    def reduce(self) -> Reduce:
        """Reduction, from METRICS."""
        return row_of(self.name).reduce


def reduced(metrics: Iterable[Metric]) -> dict[str, Reported]:
    """Name -> the one number (lists for a matrix) that all values of that name come to, sorted by name."""
    by_name: dict[str, list[Metric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    return {name: _as_reported(_reduce(by_name[name])) for name in sorted(by_name)}


def _reduce(metrics: list[Metric]) -> Tensor:
    reduce = metrics[0].reduce
    values = torch.stack([torch.as_tensor(m.value, dtype=torch.float64, device="cpu") for m in metrics])
    if reduce is SUM:
        return values.sum(0)
    if reduce in (MEAN, EXP_MEAN):
        mean = values.sum(0) / sum(float(m.count) for m in metrics)
        return mean.exp() if reduce is EXP_MEAN else mean
    if reduce in (MAX, MIN):
        return values.amax(0) if reduce is MAX else values.amin(0)
    return values[-1]


def _as_reported(value: Tensor) -> Reported:
    """Whole numbers lose their `.0`: a matrix of token counts is half as long on disk."""
    if value.dim():
        return [_as_reported(row) for row in value]
    number = float(value)
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else number
