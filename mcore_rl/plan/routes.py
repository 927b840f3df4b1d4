"""Bytes of the routes and router scores that replay keeps of a rollout batch, and the memory that they wait in."""

from dataclasses import dataclass
from itertools import pairwise
from math import comb

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.plan.weights import layers_by_stage

GIB = 2**30
BYTE_CODES = 256
"""Largest number of route codes that one byte each stores."""
WORD_BITS = 56
"""Most bits of a word of several codes (replay/codec.py)."""
SCORE_BYTES = 6
"""Bytes of an expert and of its score, for the router-shift ratio (replay/router_shift.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteBytes:
    """Bytes of one rank's routes in each memory."""

    device: int = 0
    host: int = 0
    """Page-locked main memory."""
    file: int = 0

    def __add__(self, other: "RouteBytes") -> "RouteBytes":
        return RouteBytes(
            device=self.device + other.device, host=self.host + other.host, file=self.file + other.file
        )


def layer_bits(model: ModelConfig, replay: ReplayConfig) -> int:
    """Return the bits of a token's route in one layer, as replay/codec.py stores it."""
    top_k = model.moe.top_k
    num_codes = model.moe.num_experts * (2 if model.moe.capacity_factor else 1)
    if replay.encoding == "bytes":
        return 8 * top_k * (1 if num_codes <= BYTE_CODES else 2)
    for num_words in range(1, top_k + 1):
        bounds = [top_k * index // num_words for index in range(num_words + 1)]
        sizes = [end - begin for begin, end in pairwise(bounds)]
        if replay.encoding == "bits":
            bits = [size * max(1, (num_codes - 1).bit_length()) for size in sizes]
        else:
            bits = [max(1, (comb(num_codes, size) - 1).bit_length()) for size in sizes]
        if max(bits) <= WORD_BITS:
            return sum(bits)
    raise AssertionError(f"no word of {WORD_BITS} bits holds one of {num_codes} codes")


def routes_of_rank(config: RlRunConfig, world_size: int, stage: int) -> RouteBytes:
    """Return the bytes on a rank of a pipeline stage; completions are taken to be of the longest length."""
    model, mesh, replay = config.model, config.mesh, config.replay
    if not model.is_moe:
        return RouteBytes()
    replicas = max(1, world_size // mesh.model_parallel)
    parts = mesh.tp if mesh.sequence_parallel else 1
    tokens = -(-config.rollout_size * config.longest_sample // (replicas * mesh.cp * parts))
    layers = sum(model.moe_layers[layer] for layer in layers_by_stage(model, mesh)[stage])
    records = config.rl.update.old_logprobs == "trainer" and replay.kind != "r3"
    caches = [tokens * -(-layers * layer_bits(model, replay) // 8)] * (records + config.wants_engine_routes)
    if config.rl.loss.uses_router_shift:
        caches.append(tokens * layers * model.moe.top_k * SCORE_BYTES)
    return sum((_stored(size, replay) for size in caches), start=RouteBytes())


def _stored(size: int, replay: ReplayConfig) -> RouteBytes:
    """Return where a cache of this size goes: each memory up to the budget, the rest to the next slower one."""
    if replay.store == "file":
        return RouteBytes(file=size)
    room = size if replay.budget_gib is None else int(replay.budget_gib * GIB)
    first, rest = min(size, room), max(0, size - room)
    if replay.store == "pinned":
        return RouteBytes(host=first, file=rest)
    return RouteBytes(device=first, host=min(rest, room), file=max(0, rest - room))
