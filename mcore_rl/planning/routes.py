"""Bytes of the routes and router scores that replay keeps of a rollout batch, and the memory that they wait in."""

from dataclasses import dataclass

from mcore_rl.config.model import ModelConfig
from mcore_rl.planning.training import Training
from mcore_rl.planning.weights import layers_by_stage

BYTE_CODES = 256
"""Largest number of route codes that a byte stores."""
SCORE_BYTES = 6
"""Bytes of an expert and of its score, for the router-shift ratio (rl/objectives/router_shift.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteBytes:
    """Bytes of a rank's routes in each memory."""

    device: int = 0
    host: int = 0
    """Page-locked main memory."""


def layer_bytes(model: ModelConfig) -> int:
    """Return the bytes of a token's route in one layer, as replay/cache.py stores it."""
    num_codes = model.moe.num_experts * (2 if model.moe.capacity_factor else 1)
    return model.moe.top_k * (1 if num_codes <= BYTE_CODES else 2)


def routes_of_rank(training: Training, stage: int) -> RouteBytes:
    """Return the bytes on a rank of a pipeline stage, assuming completions of the longest length."""
    model, mesh, rollouts = training.model, training.mesh, training.rollouts
    if rollouts is None or not model.is_moe:
        return RouteBytes()
    parts = mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)
    tokens = -(-rollouts.num_completions * training.sample_length // (max(1, training.replicas) * parts))
    layers = sum(model.moe_layers[layer] for layer in layers_by_stage(model, mesh)[stage])
    each = layer_bytes(model) * rollouts.routes_per_token
    if rollouts.keeps_router_scores:
        each += model.moe.top_k * SCORE_BYTES
    size = tokens * layers * each
    return RouteBytes(device=size) if rollouts.route_store == "device" else RouteBytes(host=size)
