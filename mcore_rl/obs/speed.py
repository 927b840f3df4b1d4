"""Speed of training as metrics."""

from mcore_rl.obs.metrics import Metric


def speed_metrics(
    num_tokens: float, step_s: float, num_ranks: int, flops_per_token: float, peak_flops: float
) -> list[Metric]:
    """Return tokens/s, model TFLOP/s and MFU per rank, and the time of the step.

    Args:
        num_tokens: Trained tokens of the step, summed over all ranks.
        step_s: Wall time of the step.
        num_ranks: Number of ranks in the world.
        flops_per_token: Model FLOPs of forward and backward (plan/flops.py).
        peak_flops: Peak FLOP/s of one rank's device (obs/peak.py).
    """
    flops = num_tokens * flops_per_token
    rank_s = step_s * num_ranks
    return [
        Metric("train/step_s", step_s),
        Metric("train/tokens_per_s_per_rank", num_tokens, rank_s),
        Metric("train/model_tflops_per_rank", flops / 1e12, rank_s),
        Metric("train/mfu", flops, rank_s * peak_flops),
    ]
