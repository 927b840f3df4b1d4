"""Speed of training as metrics."""

from mcore_rl.obs.metrics import Metric


def speed_metrics(
    num_tokens: float, step_s: float, num_ranks: int, flops_per_token: float, peak_flops: float
) -> list[Metric]:
    """Tokens/s, model TFLOP/s and MFU of a rank, and the step's time: `num_tokens` are the whole world's."""
    flops = num_tokens * flops_per_token
    rank_s = step_s * num_ranks
    return [
        Metric("train/step_s", step_s),
        Metric("train/tokens_per_s_per_rank", num_tokens, rank_s),
        Metric("train/model_tflops_per_rank", flops / 1e12, rank_s),
        Metric("train/mfu", flops, rank_s * peak_flops),
    ]
