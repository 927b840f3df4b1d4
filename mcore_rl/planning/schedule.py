"""The order of forward and backward passes on a pipeline stage, and the number of microbatches that wait between the
two.

It is the order of Megatron's schedules (1F1B, and interleaved, arXiv 2104.04473);
tests/unit/fake_world/test_recorder.py compares it with Megatron's own order, pass by pass.
"""

from collections.abc import Sequence
from typing import Literal

from mcore_rl.config.mesh import MeshConfig

Kind = Literal["F", "B"]
"""A forward or a backward pass."""
Pass = tuple[Kind, int, int]
"""Kind, model chunk on its stage, and microbatch."""


def schedule(pp: int, vpp: int, num_microbatches: int, stage: int) -> list[Pass]:
    """Return the passes of a stage in Megatron's order.

    With more than one chunk on a stage, microbatches go round in groups of `pp`: all of a group through the first
    chunk, then through the next.
    """
    total = num_microbatches * vpp
    if vpp == 1:
        warmup = pp - stage - 1
    else:
        warmup = 2 * (pp - stage - 1) + (vpp - 1) * pp
    warmup = min(warmup, total)
    groups = [range(first, min(first + pp, num_microbatches)) for first in range(0, num_microbatches, pp)]
    forward = [(chunk, microbatch) for group in groups for chunk in range(vpp) for microbatch in group]
    # Backward passes go through the chunks in reverse order.
    backward = [(vpp - 1 - chunk, microbatch) for chunk, microbatch in forward]
    passes: list[Pass] = [("F", *forward[index]) for index in range(warmup)]
    for index in range(total - warmup):
        passes += [("F", *forward[warmup + index]), ("B", *backward[index])]
    return passes + [("B", *backward[index]) for index in range(total - warmup, total)]


def chunks_in_flight(mesh: MeshConfig, stage: int, num_microbatches: int) -> int:
    """Return the largest number of a stage's model chunks that wait for their backward pass after the forward pass
    (1F1B).
    """
    if mesh.vpp == 1:
        return min(mesh.pp - stage, num_microbatches)
    # Megatron's warm-up of the interleaved schedule (arXiv 2104.04473), and the microbatch in its forward pass.
    warmup = 2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp
    return min(warmup + 1, num_microbatches * mesh.vpp)


def most_kept(mesh: MeshConfig, stage: int, num_microbatches: int, kept: Sequence[int]) -> int:
    """Return the most bytes that a stage keeps at a time, if a microbatch keeps `kept[chunk]` of them in a chunk."""
    # After the warm-up each group of pp microbatches is as the one before it.
    num_microbatches = min(num_microbatches, 4 * mesh.pp)
    now = most = 0
    for kind, chunk, _ in schedule(mesh.pp, mesh.vpp, num_microbatches, stage):
        now += kept[chunk] if kind == "F" else -kept[chunk]
        most = max(most, now)
    return most
