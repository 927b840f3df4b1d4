"""The table of all metrics. METRICS is their documentation: a name that is not in it is refused."""

import difflib
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

Reported: TypeAlias = "float | list[Reported]"
"""Value of a metric as it is written: a number, or a list of rows for a matrix."""


class Reduce(Enum):
    """How several values of one metric, each with its count, become the one that is told."""

    SUM = "sum of the values"
    MEAN = "sum of the values / sum of the counts"
    EXP_MEAN = "e to the MEAN"
    MAX = "largest value"
    MIN = "smallest value"
    LAST = "the latest value"


SUM, MEAN, EXP_MEAN, MAX, MIN, LAST = Reduce


class MetricRow(NamedTuple):
    """A row of METRICS; the unit 1 is a pure number."""

    unit: str
    reduce: Reduce
    text: str


METRICS: dict[str, MetricRow] = {
    "train/loss_nats": MetricRow("nats/token", MEAN, "Next-token cross entropy; no balance or MTP loss in it."),
    "train/perplexity": MetricRow("1", EXP_MEAN, "e to train/loss_nats; give it the same value and count."),
    "train/grad_norm": MetricRow("1", MEAN, "Global L2 norm of the gradient, before clipping."),
    "train/lr": MetricRow("1", LAST, "Learning rate."),
    "train/tokens_per_s_per_rank": MetricRow("tokens/s", MEAN, "Trained tokens / (seconds * ranks)."),
    "train/model_tflops_per_rank": MetricRow("TFLOP/s", MEAN, "Model FLOPs (plan/flops.py) / (seconds * ranks)."),
    "train/mfu": MetricRow("1", MEAN, "Model FLOP/s of a rank over the peak of its device."),
    "train/step_s": MetricRow("s", MEAN, "Wall time of a step."),
    "train/skipped_steps": MetricRow("steps", LAST, "Steps so far whose update was left out: not finite."),
    "train/consumed_samples": MetricRow("sequences", LAST, "Sequences read so far."),
    "train/consumed_tokens": MetricRow("tokens", LAST, "Tokens trained on so far."),
    "train/global_batch": MetricRow("sequences", LAST, "Sequences of a step."),
    "moe/aux_loss": MetricRow("1", MEAN, "Balance loss before its coefficient, mean over layers; 1 is even."),
    "moe/z_loss": MetricRow("1", MEAN, "Router z-loss before its coefficient, mean over layers."),
    "moe/load_max_over_mean": MetricRow("1", MEAN, "Tokens of the busiest expert / mean; mean over layers."),
    "moe/load_entropy": MetricRow("1", MEAN, "Entropy of the shares / log(experts), mean over layers; 1 is even."),
    "moe/dropped_tokens": MetricRow("choices", SUM, "Choices beyond an expert's capacity, all layers."),
    "moe/dropped_fraction": MetricRow("1", MEAN, "moe/dropped_tokens over all choices."),
    "moe/expert_load": MetricRow("tokens", SUM, "Matrix: row = layer from 0 (zeros: dense), column = expert."),
    "moe/layer_NN/load_max_over_mean": MetricRow("1", MEAN, "Of layer NN, from 0 as in parameter names."),
    "moe/layer_NN/load_entropy": MetricRow("1", MEAN, "Of layer NN, from 0 as in parameter names."),
    "mtp/loss_nats": MetricRow("nats/token", MEAN, "Cross entropy of the multi-token-prediction heads."),
    "mtp/load_max_over_mean": MetricRow("1", MEAN, "As moe/load_max_over_mean, over the MTP layers."),
    "mtp/load_entropy": MetricRow("1", MEAN, "As moe/load_entropy, over the MTP layers."),
    "mtp/dropped_tokens": MetricRow("choices", SUM, "As moe/dropped_tokens, over the MTP layers."),
    "mtp/dropped_fraction": MetricRow("1", MEAN, "As moe/dropped_fraction, over the MTP layers."),
    "mtp/expert_load": MetricRow("tokens", SUM, "Matrix: row = MTP layer from 0, column = expert."),
    "mtp/layer_NN/load_max_over_mean": MetricRow("1", MEAN, "Of MTP layer NN, counted from 0."),
    "mtp/layer_NN/load_entropy": MetricRow("1", MEAN, "Of MTP layer NN, counted from 0."),
    "policy/loss": MetricRow("1", MEAN, "What is minimised, aggregated as rl.loss says, with KL and entropy."),
    "policy/objective": MetricRow("1", MEAN, "The same without KL and entropy."),
    "policy/entropy_nats": MetricRow("nats/token", MEAN, "Of the next token over the whole vocabulary."),
    "policy/kl_old_nats": MetricRow("nats/token", MEAN, "KL(old policy || policy), k3."),
    "policy/kl_reference_nats": MetricRow("nats/token", MEAN, "KL(policy || reference), k3."),
    "policy/clip_ratio_low": MetricRow("1", MEAN, "Tokens whose ratio was clipped from below."),
    "policy/clip_ratio_high": MetricRow("1", MEAN, "Tokens whose ratio was clipped from above."),
    "policy/clip_ratio_low_sequences": MetricRow("1", MEAN, "Sequences with such a token."),
    "policy/clip_ratio_high_sequences": MetricRow("1", MEAN, "Sequences with such a token."),
    "policy/ratio_mean": MetricRow("1", MEAN, "Policy / old policy, mean over tokens."),
    "policy/ratio_variance": MetricRow("1", MEAN, "Of the ratio, over tokens."),
    "policy/log_ratio_max": MetricRow("nats", MAX, "Log of the largest ratio."),
    "policy/log_ratio_min": MetricRow("nats", MIN, "Log of the smallest ratio."),
    "rollout/mismatch_kl_nats": MetricRow("nats/token", MEAN, "KL(engine || old policy), k3."),
    "rollout/mismatch_max": MetricRow("nats", MAX, "Largest difference of engine's and trainer's logprobs."),
    "rollout/importance_sampling_masked_fraction": MetricRow("1", MEAN, "Tokens that importance sampling masks."),
    "routes/changed_fraction": MetricRow("1", MEAN, "Routes (token, layer, slot) not of the old policy (R3: engine)."),
    "routes/changed_tokens_fraction": MetricRow("1", MEAN, "Tokens with such a route in any layer."),
    "routes/gate_mass_moved": MetricRow("1", MEAN, "Share of the gates on such; mean over layers."),
    "routes/layer_NN/changed_fraction": MetricRow("1", MEAN, "Of layer NN, from 0."),
    "routes/layer_NN/gate_mass_moved": MetricRow("1", MEAN, "Of layer NN, from 0."),
    "routes/compared_tokens": MetricRow("tokens", SUM, "Whose routes are known and were compared."),
    "routes/unknown_tokens": MetricRow("tokens", SUM, "Routed live because no routes came (replay.missing)."),
    "rollout_routes/changed_fraction": MetricRow("1", MEAN, "Routes (token, layer, slot) not of the engine."),
    "rollout_routes/changed_tokens_fraction": MetricRow("1", MEAN, "Tokens with such a route in any layer."),
    "rollout_routes/gate_mass_moved": MetricRow("1", MEAN, "Share of the gates on such; mean over layers."),
    "rollout_routes/layer_NN/changed_fraction": MetricRow("1", MEAN, "Of layer NN, from 0."),
    "rollout_routes/layer_NN/gate_mass_moved": MetricRow("1", MEAN, "Of layer NN, from 0."),
    "rollout_routes/compared_tokens": MetricRow("tokens", SUM, "Whose routes are known and were compared."),
    "rollout_routes/unknown_tokens": MetricRow("tokens", SUM, "Routed live because no routes came (replay.missing)."),
    "routes/cached_bytes": MetricRow("bytes", LAST, "Routes held for replay, all ranks."),
    "reward/mean": MetricRow("1", MEAN, "Weighted sum of the parts, mean over completions."),
    "reward/part/NAME": MetricRow("1", MEAN, "Part NAME of rl.reward.parts before its weight; overlong: length."),
    "reward/accuracy": MetricRow("1", MEAN, "Completions to which the first part gives 1 or more."),
    "reward/group_std": MetricRow("1", MEAN, "Standard deviation (ddof 0) of a group's rewards, mean over groups."),
    "reward/groups_without_signal_fraction": MetricRow("1", MEAN, "Groups whose rewards are all the same."),
    "reward/errors": MetricRow("scores", SUM, "Parts that gave no number; worth rl.reward.error_value."),
    "reward/errors_raised": MetricRow("scores", SUM, "Of them: the function raised."),
    "reward/errors_not_finite": MetricRow("scores", SUM, "Of them: NaN or infinite."),
    "reward/errors_bad_steps": MetricRow("scores", SUM, "Of them: no rising (end, value) within the text."),
    "reward/errors_timeout": MetricRow("scores", SUM, "Of them: longer than rl.reward.timeout_s."),
    "reward/errors_died": MetricRow("scores", SUM, "Of them: its process crashed."),
    "rl/step_s": MetricRow("s", MEAN, "Wall time of a rollout batch with its updates."),
    "rl/rollouts": MetricRow("rollouts", LAST, "Rollout batches learned from so far."),
    "rl/consumed_prompts": MetricRow("prompts", LAST, "Prompts taken so far, unused ones too."),
    "rollout/completion_tokens": MetricRow("tokens", MEAN, "Length of a completion."),
    "rollout/longest_completion_tokens": MetricRow("tokens", MAX, "Length of the longest."),
    "rollout/prompt_tokens": MetricRow("tokens", MEAN, "Length of a prompt."),
    "rollout/truncated_fraction": MetricRow("1", MEAN, "Completions that reached rl.rollout.max_new_tokens."),
    "rollout/tokens_per_s_per_replica": MetricRow("tokens/s", MEAN, "Completion tokens / (seconds * replicas)."),
    "rollout/refills": MetricRow("rollouts", MEAN, "Further rollouts that dynamic sampling took, a step."),
    "rollout/unused_groups": MetricRow("groups", MEAN, "Groups without signal, or too many, a step."),
    "eval/accuracy": MetricRow("1", MEAN, "Held-out prompts' answers to which the first part gives 1."),
    "eval/reward": MetricRow("1", MEAN, "Reward of the answers to held-out prompts."),
    "eval/completion_tokens": MetricRow("tokens", MEAN, "Length of these answers."),
    "eval/truncated_fraction": MetricRow("1", MEAN, "Of them, those that reached the longest length."),
    "eval/pass_at_K": MetricRow("1", MEAN, "Chance that one of K answers to a held-out prompt is right."),
    "eval/loss_nats": MetricRow("nats/token", MEAN, "train/loss_nats on the validation text."),
    "eval/perplexity": MetricRow("1", EXP_MEAN, "e to eval/loss_nats."),
    "test/loss_nats": MetricRow("nats/token", MEAN, "train/loss_nats on the test text, at the end."),
    "test/perplexity": MetricRow("1", EXP_MEAN, "e to test/loss_nats."),
    "data/unigram_nats": MetricRow("nats/token", LAST, "Entropy of the token frequencies: loss without context."),
    "data/examples": MetricRow("conversations", LAST, "To train on."),
    "data/skipped_examples": MetricRow("conversations", LAST, "Left out: longer than a row."),
    "data/prompts": MetricRow("prompts", LAST, "To learn from; 0: a task that makes them without end."),
    "data/filled_fraction": MetricRow("1", LAST, "Positions of packed rows that hold a token of an example."),
    "memory/resident_bytes": MetricRow("bytes", LAST, "Main memory that the process holds."),
    "memory/peak_resident_bytes": MetricRow("bytes", MAX, "The most it ever held."),
    "memory/device_bytes": MetricRow("bytes", LAST, "Device memory in tensors."),
    "memory/peak_device_bytes": MetricRow("bytes", MAX, "The most that was ever in tensors."),
    "memory/device_reserved_bytes": MetricRow("bytes", LAST, "Device memory that the allocator holds."),
    "checkpoint/blocking_s": MetricRow("s", LAST, "How long training stood still for a save."),
    "checkpoint/save_s": MetricRow("s", LAST, "From the start of a save until the checkpoint was complete."),
    "checkpoint/load_s": MetricRow("s", LAST, "Reading a checkpoint."),
    "checkpoint/bytes": MetricRow("bytes", LAST, "Size of a checkpoint on disk."),
    "time/data_s": MetricRow("s", MEAN, "Waiting for the batch, a step."),
    "time/forward_backward_s": MetricRow("s", MEAN, "Forward and backward passes, a step."),
    "time/optimizer_s": MetricRow("s", MEAN, "Gradient norm, update and gathering of parameters, a step."),
    "time/rollout_s": MetricRow("s", MEAN, "Generation, a rollout batch."),
    "time/reward_s": MetricRow("s", MEAN, "Judging, with waiting for other replicas, a rollout batch."),
    "time/old_logprobs_s": MetricRow("s", MEAN, "The old policy's passes, a rollout batch."),
    "time/routes_s": MetricRow("s", MEAN, "Replay around the passes: exchange, tapes, accounts, a rollout batch."),
    "time/reference_s": MetricRow("s", MEAN, "The reference's passes, a rollout batch."),
    "time/eval_s": MetricRow("s", LAST, "One evaluation."),
    "time/checkpoint_s": MetricRow("s", LAST, "What a save took of the training loop."),
}  # fmt: skip


def row_name(name: str) -> str:
    """Return the key of METRICS for `name`, in which a layer's index is NN, a part of the reward NAME, and k is K.

    Raises:
        ValueError: METRICS has no such row; the message names the most similar one.
    """
    key = re.sub(r"/layer_\d+/", "/layer_NN/", re.sub(r"^reward/part/.+", "reward/part/NAME", name))
    key = re.sub(r"^eval/pass_at_\d+$", "eval/pass_at_K", key)
    if key not in METRICS:
        near = difflib.get_close_matches(key, METRICS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"no metric is called {name!r}: add a row to METRICS in obs/metric_table.py.{hint}")
    return key


def row_of(name: str) -> MetricRow:
    """Return the row of METRICS for `name`."""
    return METRICS[row_name(name)]


RENAMED_METRICS = {
    "policy/clipped_low_fraction": "policy/clip_ratio_low",
    "policy/clipped_high_fraction": "policy/clip_ratio_high",
    "policy/clipped_low_sequences_fraction": "policy/clip_ratio_low_sequences",
    "policy/clipped_high_sequences_fraction": "policy/clip_ratio_high_sequences",
    "rollout/mismatch_dropped_fraction": "rollout/importance_sampling_masked_fraction",
    "reward/solved_fraction": "reward/accuracy",
    "eval/solved_fraction": "eval/accuracy",
}
"""Name in the files of older runs -> name in METRICS."""


def with_current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with the names of METRICS, also when an older version of this package wrote it."""
    return {RENAMED_METRICS.get(name, name): value for name, value in record.items()}
