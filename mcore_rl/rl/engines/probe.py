"""The probe: whether a server has the trainer's weights, by the logprobs of fixed sequences under both.

A server's status codes and version numbers do not show it: a reload can be silently wrong with HTTP 200. The probe does
not see a server's prefix cache, as logprobs of a prompt are computed without it. Nor does it see weights that differ by
too little to move these logprobs by `ProbeLimit.limit`, as one small step may; over further updates they add up to it.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.data.packing import padded
from mcore_rl.data.plan import PackingLimits
from mcore_rl.model.router_load import experts_hit
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.schedule import run_pass
from mcore_rl.rl.batch import TrainedSample, make_microbatch
from mcore_rl.rl.engines.native.engine import evaluating, without_capacity
from mcore_rl.rl.objectives.heads import LogprobHead

SEQUENCE_TOKENS = 24
FEWEST, MOST = 6, 96
"""Numbers of sequences: as few as reach every expert of every layer, and no more than the second."""
PACKED = 6
"""Sequences of one microbatch."""
LENGTH_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Difference of the logprobs of a server and of the trainer, in nats."""

    largest: float
    mean: float
    """Mean of the absolute differences."""


@dataclass(frozen=True, slots=True)
class ProbeLimit:
    """Limit of a difference above which the server does not have the trainer's weights."""

    statistic: Literal["largest", "mean"]
    limit: float

    def holds(self, difference: ProbeDifference) -> bool:
        """Whether a difference is of the same weights; a NaN is not."""
        return self.of(difference) < self.limit

    def of(self, difference: ProbeDifference) -> float:
        """Return the number of a difference that the limit is for."""
        return difference.largest if self.statistic == "largest" else difference.mean


def probe_limit(*, is_fp32: bool, dtype: str = "auto", tolerance: float | None = None) -> ProbeLimit:
    """Return the limit of the difference between a server and a trainer.

    Args:
        is_fp32: Whether the trainer computes in fp32.
        dtype: Type of the server's weights, as `rl.engine.dtype` names it; `auto`: the trainer's.
        tolerance: Replaces the limit's number.

    Seen on vLLM 0.32: 5e-6 at most in fp32; in bf16 0.26 at most and 0.017 in the mean, while each kind of broken
    update gave 0.5 or more in the mean of unrelated weights.
    """
    if is_fp32 and dtype in ("auto", "fp32"):
        return ProbeLimit("largest", 2e-4 if tolerance is None else tolerance)
    return ProbeLimit("mean", 0.1 if tolerance is None else tolerance)


def difference_of(ours: Iterable[Sequence[float]], theirs: Iterable[Sequence[float]]) -> ProbeDifference:
    """Return the difference of two lists of logprobs of the same sequences."""
    apart = [
        abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    ]
    largest = math.nan if any(math.isnan(value) for value in apart) else max(apart)
    return ProbeDifference(largest, sum(apart) / len(apart))


def probe_sequences(count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the first `count` sequences for a vocabulary: the same in every process."""
    generator = random.Random(20260000)
    return [tuple(generator.randrange(vocab_size) for _ in range(SEQUENCE_TOKENS)) for _ in range(count)]


class Probe:
    """Sequences that reach all experts, and the trainer's logprobs of them."""

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig) -> None:
        self._chunks, self._mesh, self._model = list(chunks), mesh, model
        self._device = next(chunks[0].parameters()).device
        self.sequences = probe_sequences(FEWEST, model.vocab_size)
        self.num_unreached = 0
        """Experts, over all layers, that no sequence reaches although there are MOST of them."""

    def logprobs(self) -> list[list[float]]:
        """Collective over the world: return the logprobs of tokens 1, 2, ... of each sequence, under the weights that
        the modules have now, at temperature 1.

        Where experts are reached by no sequence, there are more sequences from this call on.
        """
        while True:
            logprobs_NT, self.num_unreached = self._pass()
            if not self.num_unreached or len(self.sequences) >= MOST:
                return logprobs_NT.tolist()
            self.sequences = probe_sequences(min(MOST, 2 * len(self.sequences)), self._model.vocab_size)

    @torch.no_grad()
    def _pass(self) -> tuple[Tensor, int]:
        """Collective over the world: return the logprobs `[N, T - 1]`, and how many experts are not reached."""
        mesh = self._mesh
        samples = {
            index: TrainedSample(
                tokens_T=torch.tensor(tokens),
                num_prompt_tokens=1,
                rollout_logprobs_C=torch.zeros(len(tokens) - 1),
                is_trained=True,
            )
            for index, tokens in enumerate(self.sequences)
        }
        limits = self._limits()
        rows = [list(samples)[start : start + PACKED] for start in range(0, len(samples), PACKED)]
        rows += [[]] * (-len(rows) % limits.microbatch_multiple)
        microbatches = [make_microbatch(samples, row, limits, mesh.cp, self._device) for row in rows]
        head = LogprobHead(mesh, self._model.vocab_size, temperature=1.0, chunk_tokens=1024)
        with evaluating(self._chunks), without_capacity(self._chunks), experts_hit(self._chunks) as hit_LE:
            outputs = run_pass(self._chunks, microbatches, head, backward=False)
        logprobs_NT = torch.zeros(len(samples), SEQUENCE_TOKENS - 1, dtype=torch.float64, device=self._device)
        # Tensor- and data-parallel ranks have the same numbers: those of the first count.
        if mesh.tp.rank == 0 and mesh.dp.rank == 0:
            for microbatch, output in zip(microbatches, outputs, strict=False):
                mask_T = microbatch.completion_mask_T
                indices = torch.tensor(microbatch.samples, device=self._device)
                rows_T = indices[microbatch.sequence_T[mask_T]]
                positions_T = microbatch.inputs.position_ids_Bs[0][mask_T]
                logprobs_NT[rows_T, positions_T] = output["logprobs"][mask_T].double()
        dist.all_reduce(logprobs_NT, group=mesh.world.group)
        num_unreached = 0
        if self._model.is_moe:
            hits_LE = hit_LE.int()
            dist.all_reduce(hits_LE, op=dist.ReduceOp.MAX, group=mesh.world.group)
            num_unreached = sum(
                int((hits_LE[layer] == 0).sum())
                for layer, is_moe in enumerate(self._model.moe_layers)
                if is_moe
            )
        return logprobs_NT.cpu(), num_unreached

    def _limits(self) -> PackingLimits:
        mesh = self._mesh
        zigzag = mesh.config.zigzag
        multiple = lcm(zigzag, mesh.tp.size * mesh.cp.size if mesh.sequence_parallel else 1, LENGTH_MULTIPLE)
        return PackingLimits(
            max_tokens=padded(PACKED * padded(SEQUENCE_TOKENS - 1, zigzag), multiple),
            multiple=multiple,
            sample_multiple=zigzag,
            microbatch_multiple=mesh.pp.size if mesh.config.vpp > 1 else 1,
            is_fixed=mesh.pp.size > 1,
        )
