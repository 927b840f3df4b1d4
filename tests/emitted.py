"""Which test run emits which metrics of the table, so that a row which nothing emits fails a test.

A run of tests/e2e that exists anyway calls `assert_emitted`, and tests/unit/rl/test_reward.py asserts the scores of an
environment; tests/unit/metrics/test_emitted.py asserts that the runs and ONLY_ON_CUDA together cover the table.
"""

from fnmatch import fnmatchcase
from pathlib import Path

from mcore_rl.metrics.jsonl import read_records
from mcore_rl.metrics.metric_table import METRICS, row_name

EMITTED_BY: dict[str, tuple[str, ...]] = {
    "pretrain": (
        "train/*", "moe/*", "mtp/*", "eval/loss_nats", "eval/perplexity", "test/*", "data/unigram_nats",
        "checkpoint/save_s", "checkpoint/blocking_s", "checkpoint/bytes", "time/data_s", "time/forward_backward_s",
        "time/optimizer_s", "time/checkpoint_s",
    ),
    "sft": ("data/*examples", "data/filled_fraction", "checkpoint/load_s"),
    "rl": (
        "policy/*", "rollout/*_tokens", "rollout/truncated_fraction", "rollout/tokens_per_s_per_replica",
        "rollout/mismatch_kl_nats", "rollout/mismatch_kl_*_routes_nats", "rollout/layer_NN/mismatch_kl_routing_nats",
        "rollout/ratio_variance_*", "rollout/mismatch_max", "rollout/importance_sampling_masked_fraction",
        "routes/[!i]*", "rollout_routes/*", "reward/[!e]*", "reward/errors", "reward/errors_[!bt]*",
        "reward/errors_bad_steps", "reward/errors_timeout", "rl/*", "eval/accuracy", "eval/prompts", "eval/reward*",
        "eval/completion_tokens", "eval/truncated_fraction", "eval/pass_at_K", "data/prompts",
        "memory/*resident_bytes", "time/rollout_s", "time/reward_s", "time/old_logprobs_s", "time/routes_s",
        "time/split_s", "time/reference_s", "time/eval_s",
    ),
    "scores of an environment": ("reward/errors_bad_reply", "reward/errors_template"),
    "rl with an environment": ("environment/*", "time/environment_s"),
    "rl ahead": (
        "rollout/stale*",
        "rollout/mixed_versions_fraction",
        "rollout/started_prompts",
        "rollout/mismatch_kl_current_nats",
        "rollout/mismatch_kl_staleness_nats",
        "rollout/mismatch_kl_*_routes_stale_nats",
    ),
    "rl with a served teacher": ("teacher/*", "time/teacher_servers_s"),
    "rl through servers": ("servers/[!s]*",),
    "rl with servers on the same GPUs": ("servers/*",),
    "rl of adapters through servers": ("lora/*",),
    "rl with a critic": (
        "critic/*", "values/*", "kl/*", "memory/waiting_*_bytes", "memory/moved_bytes", "ptx/*",
        "teacher/kl_nats", "teacher/clamped_fraction", "time/values_s", "time/critic_s", "time/moves_s",
        "time/teacher_s",
    ),
    "rl with remax": ("rollout/greedy_reward",),
    "rl with an indexer": ("routes/index_overlap",),
    "rm": (
        "pairs/loss", "pairs/accuracy", "pairs/*reward*", "pairs/calibration_error", "pairs/length_correlation",
        "pairs/*longer_fraction", "data/pairs",
    ),
    "rm of steps": ("steps/*",),
    "dpo": ("pairs/*_logprob", "pairs/chosen_loss_nats"),
    "rl with dynamic sampling": ("rollout/refills", "rollout/unused_groups", "rollout/cut_kl_nats"),
}  # fmt: skip
"""Test run -> patterns; the run emits every row of METRICS that matches one of them."""
ONLY_ON_CUDA = ("memory/device_bytes", "memory/peak_device_bytes", "memory/device_reserved_bytes")
"""Rows that no run on a CPU can emit: they are read from torch.cuda's allocator."""


def rows_of(run: str) -> set[str]:
    return {row for row in METRICS for pattern in EMITTED_BY[run] if fnmatchcase(row, pattern)}


def assert_emitted(run: str, run_dir: Path) -> None:
    """Assert that the metrics.jsonl of `run_dir` holds every row that EMITTED_BY promises of the test run."""
    records = [record for record in read_records(run_dir / "metrics.jsonl") if "event" not in record]
    emitted = {row_name(name) for record in records for name in record.keys() - {"step", "time"}}
    missing = sorted(rows_of(run) - emitted)
    assert not missing, f"the {run} run of tests/e2e no longer emits {', '.join(missing)}"
