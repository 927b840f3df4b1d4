"""Checks of routing replay against the model and the rollout engine."""

from collections.abc import Iterator

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig

MAX_CODES = 2**15


def replay_violations(replay: ReplayConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a sentence, with its remedy, for each reason why `replay` cannot run with the policy `model`."""
    if replay.split_layers is not None and replay.split_interval is None:
        yield (
            f"replay.split_layers={replay.split_layers} with replay.split_interval=none: no mismatch is divided. Set "
            "replay.split_interval, or replay.split_layers=none."
        )
    if replay.split_layers is not None and replay.missing == "live":
        yield (
            f'replay.split_layers={replay.split_layers} with replay.missing="live": tokens without routes have '
            'no part by layer. Set replay.split_layers=none, or replay.missing="error".'
        )
    if replay.kind == "none":
        yield from _unused(replay, model)
        return
    if not model.is_moe:
        yield (
            f'replay.kind="{replay.kind}" with model.family="{model.family}" and no experts: no token is routed. '
            'Set replay.kind="none".'
        )
        return
    codes = model.moe.num_experts * (2 if model.moe.capacity_factor else 1)
    if codes > MAX_CODES:
        yield (
            f"model.moe.num_experts={model.moe.num_experts} with replay: a route is stored in 16 bits with a sign. "
            'Set replay.kind="none".'
        )
    if replay.kind == "r3" and model.moe.capacity_factor:
        yield (
            f'replay.kind="r3" with model.moe.capacity_factor={model.moe.capacity_factor}: the rollout engine '
            "drops no token, so that its routes do not say what the trainer has to drop. Set capacity_factor=none, or "
            'replay.kind="r2", which imposes what the pass for old logprobs dropped.'
        )
    if replay.kind == "r2" and replay.missing != "error":
        yield (
            f'replay.missing="{replay.missing}" with replay.kind="r2": the training engine records every route, and '
            'one that is missing is a bug. Set replay.missing="error".'
        )


def _unused(replay: ReplayConfig, model: ModelConfig) -> Iterator[str]:
    if replay.reference == "replay":
        yield (
            'replay.reference="replay" with replay.kind="none": there are no routes to impose. Set '
            'replay.reference="live", or a kind.'
        )
    if replay.split_interval is not None and not model.is_moe:
        yield "replay.split_interval with a model without experts: no token is routed. Set it to none."
    if replay.missing != "error":
        yield (
            f'replay.missing="{replay.missing}" has no effect with replay.kind="none". Set replay.missing="error".'
        )
