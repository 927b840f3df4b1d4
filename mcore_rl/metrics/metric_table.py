"""The table of all metrics. METRICS is their documentation: a name that is not in it is refused."""

import difflib
import re
from enum import Enum
from functools import cache
from typing import NamedTuple, TypeAlias

Reported: TypeAlias = "float | list[Reported]"
"""Value of a metric as it is written: a number, or a list of rows for a matrix."""


class Reduce(Enum):
    """Reduction of several values of one metric, each with its count, to the value that is written."""

    SUM = "sum of the values"
    MEAN = "sum of the values / sum of the counts"
    EXP_MEAN = "e to the MEAN"
    MAX = "largest value"
    MIN = "smallest value"
    LAST = "the latest value"


SUM, MEAN, EXP_MEAN, MAX, MIN, LAST = Reduce


class MetricRow(NamedTuple):
    """Unit, reduction and meaning of a metric.

    The unit 1 is a pure number; `fraction` is a number from 0 to 1, the fraction of all things of the kind described.
    """

    unit: str
    reduce: Reduce
    text: str


METRICS: dict[str, MetricRow] = {
    "train/loss_nats": MetricRow(
        "nats/token", MEAN, "Cross entropy of the next token, without balance and MTP losses."
    ),
    "train/perplexity": MetricRow("1", EXP_MEAN, "e to train/loss_nats; it takes the same value and count."),
    "train/grad_norm": MetricRow("1", MEAN, "Global L2 norm of the gradient, before clipping."),
    "train/lr": MetricRow("1", LAST, "Learning rate."),
    "train/tokens_per_s_per_rank": MetricRow("tokens/s", MEAN, "Trained tokens / (seconds * ranks)."),
    "train/model_tflops_per_rank": MetricRow(
        "TFLOP/s", MEAN, "Model FLOPs (planning/flops.py) / (seconds * ranks)."
    ),
    "train/mfu": MetricRow("fraction", MEAN, "Model FLOP/s of a rank / peak FLOP/s of its device."),
    "train/step_s": MetricRow("s", MEAN, "Wall time of a step."),
    "train/skipped_steps": MetricRow(
        "steps", LAST, "Steps so far whose update was skipped because the gradient was not finite."
    ),
    "train/consumed_samples": MetricRow("sequences", LAST, "Sequences read so far."),
    "train/consumed_tokens": MetricRow("tokens", LAST, "Tokens trained on so far."),
    "train/global_batch": MetricRow("sequences", LAST, "Sequences in a step."),
    "moe/aux_loss": MetricRow(
        "1", MEAN, "Balance loss before its coefficient, mean over tokens and layers; 1 for an even load."
    ),
    "moe/z_loss": MetricRow("1", MEAN, "Router z-loss before its coefficient, mean over tokens and layers."),
    "moe/load_max_over_mean": MetricRow(
        "1", MEAN, "Tokens of the busiest expert / tokens of the mean expert, mean over layers."
    ),
    "moe/load_entropy": MetricRow(
        "1", MEAN, "Entropy of the experts' shares / log(experts), mean over layers; 1 for an even load."
    ),
    "moe/dropped_tokens": MetricRow("choices", SUM, "Choices beyond an expert's capacity, in all layers."),
    "moe/dropped_fraction": MetricRow("fraction", MEAN, "moe/dropped_tokens / all choices."),
    "moe/expert_load": MetricRow(
        "tokens", SUM, "Matrix of tokens: row = layer from 0 (zeros for a dense layer), column = expert."
    ),
    "moe/layer_NN/load_max_over_mean": MetricRow(
        "1", MEAN, "moe/load_max_over_mean in layer NN, counted from 0 as in parameter names."
    ),
    "moe/layer_NN/load_entropy": MetricRow(
        "1", MEAN, "moe/load_entropy in layer NN, counted from 0 as in parameter names."
    ),
    "mtp/loss_nats": MetricRow("nats/token", MEAN, "Cross entropy of the multi-token-prediction heads."),
    "mtp/load_max_over_mean": MetricRow("1", MEAN, "moe/load_max_over_mean over the MTP layers."),
    "mtp/load_entropy": MetricRow("1", MEAN, "moe/load_entropy over the MTP layers."),
    "mtp/dropped_tokens": MetricRow("choices", SUM, "moe/dropped_tokens in the MTP layers."),
    "mtp/dropped_fraction": MetricRow("fraction", MEAN, "moe/dropped_fraction in the MTP layers."),
    "mtp/expert_load": MetricRow("tokens", SUM, "Matrix of tokens: row = MTP layer from 0, column = expert."),
    "mtp/layer_NN/load_max_over_mean": MetricRow(
        "1", MEAN, "moe/load_max_over_mean in MTP layer NN, counted from 0."
    ),
    "mtp/layer_NN/load_entropy": MetricRow("1", MEAN, "moe/load_entropy in MTP layer NN, counted from 0."),
    "policy/loss": MetricRow(
        "1",
        MEAN,
        "Loss that is minimised, aggregated as rl.loss.aggregation defines, with KL and entropy terms.",
    ),
    "policy/objective": MetricRow("1", MEAN, "policy/loss without the KL and entropy terms."),
    "policy/entropy_nats": MetricRow(
        "nats/token", MEAN, "Entropy of the next token over the whole vocabulary."
    ),
    "policy/kl_old_nats": MetricRow("nats/token", MEAN, "KL(old policy || policy), estimator k3."),
    "policy/kl_old_live_routes_nats": MetricRow(
        "nats/token",
        MEAN,
        "KL(old policy || policy after the updates) with live routes (replay.split_interval).",
    ),
    "policy/kl_old_same_routes_nats": MetricRow(
        "nats/token",
        MEAN,
        "The same with the old policy's routes imposed: the part that is not due to routing.",
    ),
    "policy/ratio_variance_live_routes": MetricRow(
        "1",
        MEAN,
        "Variance of the ratio of the policy after the updates, with live routes (replay.split_interval).",
    ),
    "policy/ratio_variance_same_routes": MetricRow(
        "1", MEAN, "The same with the old policy's routes imposed."
    ),
    "policy/layer_NN/kl_old_routing_nats": MetricRow(
        "nats/token",
        MEAN,
        "Part of a layer in policy/kl_old_live_routes_nats less policy/kl_old_same_routes_nats (replay.split_layers).",
    ),
    "policy/layer_NN/ratio_variance_routing": MetricRow(
        "1", MEAN, "The same of policy/ratio_variance_..._routes."
    ),
    "policy/kl_reference_nats": MetricRow("nats/token", MEAN, "KL(policy || reference), estimator k3."),
    "ptx/loss_nats": MetricRow("nats/token", MEAN, "Cross entropy of the texts of rl.ptx."),
    "teacher/kl_nats": MetricRow(
        "nats/token",
        MEAN,
        "KL(policy || teacher): over the vocabulary where rl.distill asks for it, else k3.",
    ),
    "kl/coeff": MetricRow("1", LAST, "Coefficient of the KL to the reference, with rl.loss.kl_target."),
    "kl/completion": MetricRow(
        "nats", LAST, "KL to the reference summed over a completion, mean over a rollout batch."
    ),
    "policy/clip_ratio_low": MetricRow(
        "fraction", MEAN, "Tokens whose probability ratio was clipped from below."
    ),
    "policy/clip_ratio_high": MetricRow(
        "fraction", MEAN, "Tokens whose probability ratio was clipped from above."
    ),
    "policy/clip_ratio_low_sequences": MetricRow(
        "fraction", MEAN, "Sequences with a token that was clipped from below."
    ),
    "policy/clip_ratio_high_sequences": MetricRow(
        "fraction", MEAN, "Sequences with a token that was clipped from above."
    ),
    "policy/ratio_mean": MetricRow("1", MEAN, "Probability ratio policy / old policy, mean over tokens."),
    "policy/ratio_variance": MetricRow("1", MEAN, "Variance of the probability ratio over tokens."),
    "policy/router_shift_ratio": MetricRow(
        "1",
        MEAN,
        "Router-shift ratio (RSPO): 1 where the scores of the old policy's experts are what they were.",
    ),
    "policy/router_shift_floored_fraction": MetricRow(
        "1", MEAN, "Trained tokens whose router-shift ratio is below rl.loss.router_shift_floor."
    ),
    "policy/log_ratio_max": MetricRow("nats", MAX, "Log of the largest probability ratio."),
    "policy/log_ratio_min": MetricRow("nats", MIN, "Log of the smallest probability ratio."),
    "policy/clamped_fraction": MetricRow(
        "fraction",
        MEAN,
        "Tokens whose probability ratio to the old policy, the reference or the rollout is above e^20, or of a "
        "probability 0: it is bounded there, without gradient.",
    ),
    "steps/loss": MetricRow(
        "nats", MEAN, "Cross entropy of a step's label, by a process reward model; eval/steps/ of data.valid."
    ),
    "steps/accuracy": MetricRow(
        "1", MEAN, "Steps whose label the sign of the score gives, but for labels of 0.5."
    ),
    "steps/wrong_found_fraction": MetricRow("1", MEAN, "Steps labelled wrong whose score is below 0."),
    "steps/right_fraction": MetricRow(
        "1", MEAN, "Steps labelled right: accuracy of a model that likes every step."
    ),
    "steps/mean_probability": MetricRow("1", MEAN, "Probability that a step is right, by the model."),
    "pairs/loss": MetricRow(
        "nats/pair",
        MEAN,
        "Loss of a pair of answers; `eval/pairs/...` is a metric of pairs on the validation data.",
    ),
    "pairs/accuracy": MetricRow(
        "fraction",
        MEAN,
        "Pairs whose chosen answer has the higher reward, an equal one counts half; ties of the data are left out.",
    ),
    "pairs/chosen_reward": MetricRow("1", MEAN, "Reward of the chosen answer."),
    "pairs/rejected_reward": MetricRow("1", MEAN, "Reward of the rejected answer."),
    "pairs/reward_margin": MetricRow("1", MEAN, "Reward of the chosen answer less that of the rejected one."),
    "pairs/chosen_logprob": MetricRow("nats", MEAN, "Logprob of the whole chosen answer under the policy."),
    "pairs/rejected_logprob": MetricRow(
        "nats", MEAN, "Logprob of the whole rejected answer under the policy."
    ),
    "pairs/chosen_loss_nats": MetricRow("nats/token", MEAN, "Cross entropy of the chosen answer's tokens."),
    "pairs/reward_mean": MetricRow("1", MEAN, "Score of an answer, by a reward model."),
    "pairs/reward_std": MetricRow("1", MEAN, "Standard deviation (ddof 0) of the answers' scores."),
    "pairs/calibration_error": MetricRow(
        "1",
        MEAN,
        "Distance between the probability with which a reward model calls an answer the better one and the fraction "
        "that is, by bins of that probability, weighted by their pairs.",
    ),
    "pairs/length_correlation": MetricRow(
        "1", MEAN, "Correlation of the answers' scores with their lengths in tokens."
    ),
    "pairs/prefers_longer_fraction": MetricRow(
        "fraction", MEAN, "Pairs of answers of different lengths whose longer one has the higher score."
    ),
    "pairs/chosen_longer_fraction": MetricRow(
        "fraction", MEAN, "Pairs of answers of different lengths whose longer one is the chosen one."
    ),
    "servers/living": MetricRow("servers", LAST, "Inference servers that have the weights of this step."),
    "servers/retried_requests": MetricRow(
        "requests", SUM, "Requests that a server did not answer as it should, and another one got."
    ),
    "servers/update_s": MetricRow(
        "s", MEAN, "Wall time of sending the weights to the servers, with the probe."
    ),
    "servers/update_bytes": MetricRow("bytes", MEAN, "Weights that are sent in an update."),
    "servers/probe_nats": MetricRow(
        "nats/token",
        MAX,
        "Largest difference of a logprob of fixed texts between a server and the trainer after an update (fp32), or "
        "the mean difference (rl.engine.probe_tolerance).",
    ),
    "lora/merge_loss": MetricRow(
        "1",
        MEAN,
        "Part of low-rank adapters that is lost by rounding the weights sent to servers, to which they are added: root "
        "of the sum of squares over that of the adapters.",
    ),
    "rollout/mismatch_kl_nats": MetricRow(
        "nats/token", MEAN, "KL(rollout policy || old policy), estimator k3: the rollout-training mismatch."
    ),
    "rollout/mismatch_kl_live_routes_nats": MetricRow(
        "nats/token",
        MEAN,
        "KL(rollout policy || trainer) with live routes of the trainer (replay.split_interval), over the tokens that "
        "the weights in training sampled.",
    ),
    "rollout/mismatch_kl_same_routes_nats": MetricRow(
        "nats/token", MEAN, "The same with the engine's routes imposed: the part that is not due to routing."
    ),
    "rollout/layer_NN/mismatch_kl_routing_nats": MetricRow(
        "nats/token",
        MEAN,
        "Part of a layer in rollout/mismatch_kl_live_routes_nats less rollout/mismatch_kl_same_routes_nats "
        "(replay.split_layers).",
    ),
    "rollout/mismatch_kl_staleness_nats": MetricRow(
        "nats/token",
        MEAN,
        "KL(rollout policy || trainer) with live routes over all tokens less that over the tokens that the weights in "
        "training sampled: the part that is due to staleness (replay.split_interval, rl.rollout.max_staleness).",
    ),
    "rollout/mismatch_kl_live_routes_stale_nats": MetricRow(
        "nats/token",
        MEAN,
        "rollout/mismatch_kl_live_routes_nats over the tokens that older weights sampled.",
    ),
    "rollout/mismatch_kl_same_routes_stale_nats": MetricRow(
        "nats/token", MEAN, "rollout/mismatch_kl_same_routes_nats over the tokens that older weights sampled."
    ),
    "rollout/ratio_variance_live_routes": MetricRow(
        "1",
        MEAN,
        "Variance of the ratio trainer / rollout policy with live routes, over the tokens that the weights in training "
        "sampled (replay.split_interval).",
    ),
    "rollout/ratio_variance_same_routes": MetricRow("1", MEAN, "The same with the engine's routes imposed."),
    "rollout/mismatch_kl_current_nats": MetricRow(
        "nats/token",
        MEAN,
        "The same over the tokens that the weights in training sampled: the part that is not due to staleness.",
    ),
    "rollout/mismatch_max": MetricRow(
        "nats", MAX, "Largest difference between the engine's and the trainer's logprob of a token."
    ),
    "rollout/cut_kl_nats": MetricRow(
        "nats/token",
        MEAN,
        "KL(distribution sampled from, after top_k, top_p and min_p || the whole one, which is trained on), exact.",
    ),
    "rollout/importance_sampling_masked_fraction": MetricRow(
        "fraction", MEAN, "Tokens that rl.loss.importance_sampling masks."
    ),
    "routes/changed_fraction": MetricRow(
        "fraction", MEAN, "Routes (token, layer, slot) that differ from the replayed ones."
    ),
    "routes/changed_tokens_fraction": MetricRow("fraction", MEAN, "Tokens with such a route in any layer."),
    "routes/gate_mass_moved": MetricRow("fraction", MEAN, "Gate mass on such routes, mean over layers."),
    "routes/disjoint_fraction": MetricRow(
        "fraction", MEAN, "Tokens without an expert in common with the replayed ones, mean over layers."
    ),
    "routes/layer_NN/changed_fraction": MetricRow(
        "fraction", MEAN, "routes/changed_fraction in layer NN, counted from 0."
    ),
    "routes/layer_NN/gate_mass_moved": MetricRow(
        "fraction", MEAN, "routes/gate_mass_moved in layer NN, counted from 0."
    ),
    "routes/layer_NN/disjoint_fraction": MetricRow(
        "fraction", MEAN, "routes/disjoint_fraction in layer NN, counted from 0."
    ),
    "routes/index_overlap": MetricRow(
        "fraction",
        MEAN,
        "Keys, chosen by an indexer for a query of the rollout engine, that training chooses too; mean over layers and "
        "64 positions of a completion of each replica. Without context parallelism, and with the native engine.",
    ),
    "routes/compared_tokens": MetricRow("tokens", SUM, "Tokens whose routes are known and were compared."),
    "routes/unknown_tokens": MetricRow(
        "tokens", SUM, "Tokens without routes: the engine left them out (replay.missing)."
    ),
    "routes/live_fraction": MetricRow(
        "fraction", MEAN, "Share of such tokens: they are routed live where the others' routes are imposed."
    ),
    "rollout_routes/changed_fraction": MetricRow(
        "fraction", MEAN, "Routes (token, layer, slot) that differ from the engine's."
    ),
    "rollout_routes/changed_tokens_fraction": MetricRow(
        "fraction", MEAN, "Tokens with such a route in any layer."
    ),
    "rollout_routes/gate_mass_moved": MetricRow(
        "fraction", MEAN, "Gate mass on such routes, mean over layers."
    ),
    "rollout_routes/disjoint_fraction": MetricRow(
        "fraction",
        MEAN,
        "Tokens without an expert in common with the engine's, mean over layers (replay.max_disagreement).",
    ),
    "rollout_routes/repeated_fraction": MetricRow(
        "fraction",
        MEAN,
        "Tokens whose routes of the engine are, in all layers, those of the token before, another id.",
    ),
    "rollout_routes/refused_completions": MetricRow(
        "completions",
        SUM,
        "Completions that were left out of a rollout batch because of the engine's routes "
        "(replay.max_refused_fraction).",
    ),
    "rollout_routes/layer_NN/changed_fraction": MetricRow(
        "fraction", MEAN, "rollout_routes/changed_fraction in layer NN, counted from 0."
    ),
    "rollout_routes/layer_NN/gate_mass_moved": MetricRow(
        "fraction", MEAN, "rollout_routes/gate_mass_moved in layer NN, counted from 0."
    ),
    "rollout_routes/layer_NN/disjoint_fraction": MetricRow(
        "fraction", MEAN, "rollout_routes/disjoint_fraction in layer NN, counted from 0."
    ),
    "rollout_routes/compared_tokens": MetricRow(
        "tokens", SUM, "Tokens whose routes are known and were compared."
    ),
    "rollout_routes/unknown_tokens": MetricRow(
        "tokens", SUM, "Tokens without routes: the engine left them out (replay.missing)."
    ),
    "rollout_routes/live_fraction": MetricRow(
        "fraction", MEAN, "Share of such tokens: they are routed live where the others' routes are imposed."
    ),
    "routes/cached_bytes": MetricRow(
        "bytes", LAST, "Size of the routes stored for replay, summed over ranks."
    ),
    "values/mean": MetricRow("1", MEAN, "The critic's value before its updates, mean over trained tokens."),
    "values/returns_mean": MetricRow(
        "1", MEAN, "Return that the critic is trained towards, mean over trained tokens."
    ),
    "values/returns_std": MetricRow(
        "1", MEAN, "Standard deviation (ddof 0) of the returns over trained tokens."
    ),
    "values/explained_variance": MetricRow(
        "1",
        MEAN,
        "1 - variance of (return - value) / variance of the return: 1 for exact values, 0 for a constant.",
    ),
    "values/advantages_std": MetricRow(
        "1",
        MEAN,
        "Standard deviation (ddof 0) of the advantages over trained tokens, before they are normalised.",
    ),
    "critic/loss": MetricRow("1", MEAN, "Clipped squared error of the values / 2, mean over trained tokens."),
    "critic/routes_changed_fraction": MetricRow(
        "fraction",
        MEAN,
        "Choices of the critic's routers that its updates would have changed, with rl.advantage.critic.replay.",
    ),
    "critic/clip_ratio": MetricRow(
        "fraction", MEAN, "Tokens whose value was clipped (rl.advantage.critic.clip_value), without gradient."
    ),
    "critic/grad_norm": MetricRow("1", MEAN, "Global L2 norm of the critic's gradient, before clipping."),
    "critic/lr": MetricRow("1", LAST, "Learning rate of the critic."),
    "critic/model_tflops_per_rank": MetricRow(
        "TFLOP/s", MEAN, "Model FLOPs of the critic's updates (planning/flops.py) / (seconds * ranks)."
    ),
    "reward/mean": MetricRow("1", MEAN, "Weighted sum of the parts of the reward, mean over completions."),
    "reward/part/NAME": MetricRow(
        "1", MEAN, "Part NAME of rl.reward.parts before its weight; `overlong` is the length penalty."
    ),
    "reward/accuracy": MetricRow(
        "fraction", MEAN, "Completions to which the first part of the reward gives 1 or more."
    ),
    "reward/group_std": MetricRow(
        "1", MEAN, "Standard deviation (ddof 0) of a group's rewards, mean over groups."
    ),
    "reward/groups_without_signal_fraction": MetricRow(
        "fraction", MEAN, "Groups whose rewards are all the same."
    ),
    "policy/groups": MetricRow("groups", SUM, "Groups that updates train on, where a group is compared."),
    "policy/groups_without_signal": MetricRow("groups", SUM, "Those whose rewards are all the same."),
    "reward/unscored_completions": MetricRow(
        "completions",
        SUM,
        "Completions without a reward, left out of their group and the loss: a part failed.",
    ),
    "reward/errors": MetricRow(
        "scores", SUM, "Scores of a part that failed; reward_failures.jsonl has the first of each kind."
    ),
    "reward/errors_raised": MetricRow("scores", SUM, "Failed scores whose function raised an exception."),
    "reward/errors_not_finite": MetricRow("scores", SUM, "Failed scores that were NaN or infinite."),
    "reward/errors_bad_steps": MetricRow(
        "scores", SUM, "Failed scores whose (end, value) steps do not rise within the text."
    ),
    "reward/errors_timeout": MetricRow(
        "scores", SUM, "Failed scores that took longer than rl.reward.timeout_s."
    ),
    "reward/errors_died": MetricRow("scores", SUM, "Failed scores whose process ended."),
    "reward/errors_bad_reply": MetricRow(
        "scores",
        SUM,
        "Failed scores of an environment that returned something else than it should, or where no part applies.",
    ),
    "reward/errors_template": MetricRow(
        "scores",
        SUM,
        "Failed scores of an environment whose messages the chat template does not take, or cannot append.",
    ),
    "environment/turns": MetricRow("turns", MEAN, "The policy's turns in a conversation."),
    "environment/tokens": MetricRow(
        "tokens",
        MEAN,
        "Tokens of the environment in a conversation after its prompt, which are not trained on.",
    ),
    "environment/ended_done_fraction": MetricRow(
        "fraction", MEAN, "Conversations that the environment ended."
    ),
    "environment/ended_document_fraction": MetricRow(
        "fraction", MEAN, "Conversations in which the policy ended the document in the place of its turn."
    ),
    "environment/ended_length_fraction": MetricRow(
        "fraction", MEAN, "Conversations with a turn of rl.rollout.max_new_tokens."
    ),
    "environment/ended_turns_fraction": MetricRow(
        "fraction", MEAN, "Conversations that reached rl.environment.max_turns."
    ),
    "environment/ended_context_fraction": MetricRow(
        "fraction", MEAN, "Conversations without room in rl.environment.max_tokens for another turn."
    ),
    "environment/ended_failed_fraction": MetricRow(
        "fraction",
        MEAN,
        "Conversations whose environment raised, took too long, died, or returned something else.",
    ),
    "rl/step_s": MetricRow("s", MEAN, "Wall time of a rollout batch with its updates."),
    "rl/rollouts": MetricRow("rollouts", LAST, "Rollout batches trained on so far."),
    "rl/consumed_prompts": MetricRow("prompts", LAST, "Prompts taken so far, including unused ones."),
    "rollout/completion_tokens": MetricRow("tokens", MEAN, "Sampled tokens of a completion."),
    "rollout/longest_completion_tokens": MetricRow(
        "tokens", MAX, "Sampled tokens of the completion that has most."
    ),
    "rollout/prompt_tokens": MetricRow("tokens", MEAN, "Length of a prompt."),
    "rollout/truncated_fraction": MetricRow(
        "fraction", MEAN, "Completions that reached rl.rollout.max_new_tokens, or a limit of rl.environment."
    ),
    "rollout/tokens_per_s_per_replica": MetricRow(
        "tokens/s", MEAN, "Completion tokens / (seconds * replicas)."
    ),
    "rollout/greedy_reward": MetricRow(
        "1", MEAN, 'Reward of the greedy completions, the baseline of rl.advantage.kind="remax".'
    ),
    "rollout/staleness": MetricRow(
        "rollouts",
        MEAN,
        "Rollout batches trained on since the weights that sampled a completion's first token.",
    ),
    "rollout/staleness_max": MetricRow("rollouts", MAX, "The same of the stalest completion."),
    "rollout/mixed_versions_fraction": MetricRow(
        "fraction", MEAN, "Completions that weights of several versions sampled (rl.rollout.max_staleness)."
    ),
    "rollout/stale_fraction": MetricRow(
        "fraction", MEAN, "Trained tokens that older weights sampled than those in training."
    ),
    "rollout/started_prompts": MetricRow(
        "prompts", MAX, "Prompts whose groups have started; those of rl/consumed_prompts have been taken."
    ),
    "rollout/refills": MetricRow(
        "rollouts", MEAN, "Further rollouts of dynamic sampling, per rollout batch."
    ),
    "rollout/unused_groups": MetricRow(
        "groups",
        MEAN,
        "Groups that dynamic sampling left out, without signal or beyond the batch, per rollout batch.",
    ),
    "eval/accuracy": MetricRow(
        "fraction", MEAN, "Answers to held-out prompts to which the first part of the reward gives 1."
    ),
    "eval/prompts": MetricRow("prompts", LAST, "Held-out prompts that eval/accuracy is the mean over."),
    "eval/reward": MetricRow("1", MEAN, "Reward of answers to held-out prompts."),
    "eval/completion_tokens": MetricRow("tokens", MEAN, "Length of answers to held-out prompts."),
    "eval/truncated_fraction": MetricRow(
        "fraction", MEAN, "Answers to held-out prompts that reached the longest length."
    ),
    "eval/pass_at_K": MetricRow(
        "fraction", MEAN, "Chance that at least one of K answers to a held-out prompt is correct."
    ),
    "eval/loss_nats": MetricRow("nats/token", MEAN, "train/loss_nats on the validation data."),
    "eval/perplexity": MetricRow("1", EXP_MEAN, "e to eval/loss_nats."),
    "test/loss_nats": MetricRow("nats/token", MEAN, "train/loss_nats on the test data, after the last step."),
    "test/perplexity": MetricRow("1", EXP_MEAN, "e to test/loss_nats."),
    "data/unigram_nats": MetricRow(
        "nats/token", LAST, "Entropy of the token frequencies: the loss of a model without context."
    ),
    "data/examples": MetricRow("conversations", LAST, "Conversations to train on."),
    "data/skipped_examples": MetricRow(
        "conversations", LAST, "Conversations left out because they are longer than data.seq_length."
    ),
    "data/prompts": MetricRow(
        "prompts", LAST, "Prompts to train on; 0 for a task that generates them without end."
    ),
    "data/pairs": MetricRow("pairs", LAST, "Pairs of answers to train on."),
    "data/filled_fraction": MetricRow("fraction", LAST, "Positions of packed sequences that hold a token."),
    "memory/resident_bytes": MetricRow("bytes", LAST, "Main memory of the process."),
    "memory/peak_resident_bytes": MetricRow("bytes", MAX, "Largest main memory of the process so far."),
    "memory/waiting_device_bytes": MetricRow(
        "bytes",
        LAST,
        "Weights of reference, teachers and reward models that stay on the device between passes.",
    ),
    "memory/waiting_host_bytes": MetricRow(
        "bytes", LAST, "Weights of reference, teachers and reward models that wait in main memory."
    ),
    "memory/moved_bytes": MetricRow(
        "bytes",
        LAST,
        "Weights and optimizer state of policy and critic that were copied between the device and rl.update.store and "
        "rl.advantage.critic.store, per rollout batch and rank.",
    ),
    "memory/device_bytes": MetricRow("bytes", LAST, "Device memory in tensors."),
    "memory/peak_device_bytes": MetricRow("bytes", MAX, "Largest device memory in tensors so far."),
    "memory/device_reserved_bytes": MetricRow(
        "bytes", LAST, "Device memory reserved by PyTorch's allocator."
    ),
    "checkpoint/blocking_s": MetricRow("s", LAST, "Time for which a save stopped training."),
    "checkpoint/save_s": MetricRow(
        "s", LAST, "Time from the start of a save until the checkpoint was complete."
    ),
    "checkpoint/load_s": MetricRow("s", LAST, "Time to load a checkpoint."),
    "checkpoint/bytes": MetricRow("bytes", LAST, "Size of a checkpoint on disk."),
    "time/data_s": MetricRow("s", MEAN, "Waiting for the batch, per step."),
    "time/forward_backward_s": MetricRow("s", MEAN, "Forward and backward passes, per step."),
    "time/optimizer_s": MetricRow("s", MEAN, "Gradient norm, update and gathering of parameters, per step."),
    "time/rollout_s": MetricRow("s", MEAN, "Generation, per rollout batch."),
    "time/environment_s": MetricRow(
        "s", MEAN, "Answers of environments, within time/rollout_s, per rollout batch."
    ),
    "time/reward_s": MetricRow(
        "s", MEAN, "Scoring, including the wait for other replicas, per rollout batch."
    ),
    "time/old_logprobs_s": MetricRow("s", MEAN, "Passes of the old policy, per rollout batch."),
    "time/routes_s": MetricRow(
        "s", MEAN, "Replay around the passes: exchange, tapes, accounts; per rollout batch."
    ),
    "time/reference_s": MetricRow("s", MEAN, "Passes of the reference policy, per rollout batch."),
    "time/values_s": MetricRow("s", MEAN, "Passes of the critic for values, per rollout batch."),
    "time/critic_s": MetricRow("s", MEAN, "Updates of the critic, per rollout batch."),
    "time/teacher_s": MetricRow("s", MEAN, "Passes of the teachers of rl.distill, per rollout batch."),
    "time/split_s": MetricRow(
        "s",
        MEAN,
        "Passes that divide the mismatches by their routes (replay.split_interval), per rollout batch.",
    ),
    "time/moves_s": MetricRow("s", MEAN, "Copies of memory/moved_bytes, per rollout batch."),
    "time/eval_s": MetricRow("s", LAST, "One evaluation."),
    "time/checkpoint_s": MetricRow("s", LAST, "Part of a save that the training loop waited for."),
}


def row_name(name: str) -> str:
    """Return the key of METRICS for `name`, in which a layer's index is NN, a part of the reward NAME, and k is K.

    Raises:
        ValueError: METRICS has no such row; the message names the most similar row.
    """
    key = re.sub(r"/layer_\d+/", "/layer_NN/", re.sub(r"^reward/part/.+", "reward/part/NAME", name))
    key = re.sub(r"^eval/pass_at_\d+$", "eval/pass_at_K", key)
    key = re.sub(r"^eval/(pairs|steps)/", r"\1/", key)
    if key not in METRICS:
        near = difflib.get_close_matches(key, METRICS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"no metric is called {name!r}: add a row to METRICS in metrics/metric_table.py.{hint}"
        )
    return key


@cache
def row_of(name: str) -> MetricRow:
    """Return the row of METRICS for `name`."""
    return METRICS[row_name(name)]
