"""The probe compares logprobs of fixed sequences to verify that a server has the trainer's weights: a reload can be
silently wrong with HTTP 200. It does not test a prefix cache, and misses differences of weights, such as one small
update, that move logprobs less than rounding does; over further updates these add up.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.data.packing import LENGTH_MULTIPLE, padded
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.megatron.schedule import HeadOutput, Routing, run_pass
from mcore_rl.megatron.vocab import Logits
from mcore_rl.model.layers.adapters import Adapter
from mcore_rl.replay.cache import LocalTokens, local_tokens
from mcore_rl.rl.batch import (
    LogprobHead,
    PassHead,
    PolicyMicrobatch,
    evaluating,
    layout_of,
    limits_on,
    make_microbatch,
    without_capacity,
)
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.fp8_blocks import BlockRounding
from mcore_rl.rl.types import SampleShape, TrainedSample

FP32_LIMIT = 2e-4
"""Limit of the largest difference, in nats, if both compute in fp32; vLLM 0.32 was measured at 5e-6."""
ROUNDING_FACTOR = 3.0
"""Limit of the mean difference in lower precision, as a multiple of the mean difference that rounding causes within
the trainer."""
MOST_MEAN = 0.1
"""Upper bound of the limit of the mean difference, in nats, however large the effect of rounding."""
EXPERT_RATIO, EXPERT_ERRORS = 1.35, 7.0
"""An expert counts as different from the trainer's if the difference of its tokens is more than this multiple of the
other tokens' difference, by more than this number of standard errors."""
FEWEST_EXPERT_TOKENS = 32
"""Minimum number of tokens of an expert for its difference to be significant in lower precision."""
QUANTILES = (0.25, 0.95)
"""Differences are clamped to these quantiles before their logarithms are averaged: differences near 0 carry no
information, and the largest come from tokens that rounding sent to different experts, not from weights."""


@dataclass(frozen=True, slots=True)
class ExpertDifference:
    """The expert with the most significant difference between its tokens and all other tokens."""

    layer: int
    expert: int
    ratio: float
    """Geometric mean of the differences of the expert's tokens, divided by the other tokens' geometric mean."""
    errors: float
    """Logarithm of `ratio` in standard errors."""

    @property
    def is_apart(self) -> bool:
        """Whether the server's expert differs from the trainer's."""
        return self.ratio > EXPERT_RATIO and self.errors > EXPERT_ERRORS


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Difference between the logprobs of a server and the trainer, in nats."""

    largest: float
    mean: float
    """Mean of the absolute differences."""
    expert: ExpertDifference | None = None
    """The expert that differs most; None if experts are not compared, or none has enough tokens."""


@dataclass(frozen=True, slots=True)
class ProbeLimit:
    """Limit of a difference above which the server does not have the trainer's weights."""

    statistic: Literal["largest", "mean"]
    limit: float

    def holds(self, difference: ProbeDifference) -> bool:
        """Return whether a difference is within the limits; a NaN is not."""
        return self.excess(difference) is None

    def of(self, difference: ProbeDifference) -> float:
        """Return the statistic of a difference that the limit applies to."""
        return difference.largest if self.statistic == "largest" else difference.mean

    def excess(self, difference: ProbeDifference) -> str | None:
        """Describe how a difference exceeds the limits; None if it does not."""
        reasons = []
        if not self.of(difference) < self.limit:
            reasons.append(
                f"logprobs of the probe differ by {difference.largest:.3g} at most and {difference.mean:.3g} in the "
                f"mean, of which the {self.statistic} may be {self.limit:.3g}"
            )
        expert = difference.expert
        if expert is not None and expert.is_apart:
            reasons.append(
                f"logprobs of the tokens of expert {expert.expert} in layer {expert.layer} differ by "
                f"{expert.ratio:.3g} times as much as the others, {expert.errors:.3g} standard errors; rounding makes "
                f"{EXPERT_RATIO:g} times and {EXPERT_ERRORS:g} at most"
            )
        return "; ".join(reasons) or None


def probe_limit(rounding_nats: float | None, tolerance: float | None = None) -> ProbeLimit:
    """Return the limit from the mean difference that rounding causes (None: all compute in fp32), or `tolerance`."""
    if rounding_nats is None:
        return ProbeLimit("largest", FP32_LIMIT if tolerance is None else tolerance)
    return ProbeLimit("mean", min(MOST_MEAN, ROUNDING_FACTOR * rounding_nats) if tolerance is None else tolerance)


def difference_of(
    ours_NT: Tensor, theirs: Tensor | Sequence[Sequence[float]], experts_NTLK: Tensor | None = None
) -> ProbeDifference:
    """Compare two lists of logprobs `[N, T]`, in nats. `experts_NTLK` are the trainer's choices at the position that
    predicts each token, -1 in layers without experts; None: experts are not compared.
    """
    apart_NT = (torch.as_tensor(theirs, dtype=torch.float64) - ours_NT).abs()
    largest = math.nan if apart_NT.isnan().any() else float(apart_NT.max())
    expert = None if experts_NTLK is None else _most_apart(apart_NT.flatten(), experts_NTLK.flatten(0, 1))
    return ProbeDifference(largest, float(apart_NT.mean()), expert)


def tokens_of_experts(experts_MLK: Tensor, num_experts: int) -> Tensor:
    """Return how many of M tokens have chosen each expert, int64 `[L, E]`; -1 means no choice."""
    chosen_LM = experts_MLK.transpose(0, 1).flatten(1)
    counts_LE = torch.zeros(len(chosen_LM), num_experts + 1, dtype=torch.int64)
    return counts_LE.scatter_add_(1, (chosen_LM + 1).long(), torch.ones_like(chosen_LM, dtype=torch.int64))[:, 1:]


def _most_apart(apart_M: Tensor, experts_MLK: Tensor) -> ExpertDifference | None:
    """Return the expert that differs most from all other tokens, in standard errors; None if none has enough tokens."""
    low, high = torch.quantile(apart_M, apart_M.new_tensor(QUANTILES))
    logs_M = apart_M.clamp(max(float(low), torch.finfo(apart_M.dtype).tiny), float(high)).log()
    num_experts = int(experts_MLK.max()) + 1
    counts_LE = tokens_of_experts(experts_MLK, num_experts)
    chosen_LM = experts_MLK.transpose(0, 1).flatten(1)
    logs_LM = logs_M.repeat_interleave(experts_MLK.shape[2]).expand(len(chosen_LM), -1)
    sums_LE = torch.zeros(counts_LE.shape[0], num_experts + 1, dtype=logs_M.dtype)
    sums_LE = sums_LE.scatter_add_(1, (chosen_LM + 1).long(), logs_LM)[:, 1:]
    others_LE = len(logs_M) - counts_LE
    has_enough_LE = (counts_LE >= FEWEST_EXPERT_TOKENS) & (others_LE >= FEWEST_EXPERT_TOKENS)
    if not has_enough_LE.any() or not logs_M.std() > 0:
        return None
    logs_LE = sums_LE / counts_LE - (logs_M.sum() - sums_LE) / others_LE
    errors_LE = logs_LE / (logs_M.std() * (1 / counts_LE + 1 / others_LE).sqrt())
    best = int(errors_LE.where(has_enough_LE, -math.inf).argmax())
    layer, expert = divmod(best, num_experts)
    return ExpertDifference(layer, expert, math.exp(float(logs_LE[layer, expert])), float(errors_LE[layer, expert]))


SEQUENCE_TOKENS = 24
PROMPT_TOKENS = 8
"""Number of tokens of a sequence that a server completes to a sequence of as many tokens."""
FEWEST, MOST = 6, 96
"""Minimum and maximum number of sequences. In fp32 the probe starts with the minimum and doubles it until every expert
of every layer is reached, up to the maximum; in lower precision it uses the maximum."""
PACKED = 6
"""Number of sequences per microbatch."""
PLAIN = Sampling(max_new_tokens=1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReference:
    """The trainer's side of a comparison."""

    logprobs_NT: Tensor
    """Logprobs of tokens 1, 2, ... of each sequence at temperature 1, in nats, float64 on the CPU."""
    experts_NTLK: Tensor | None
    """Experts chosen at the position that predicts each of these tokens, on the CPU; -1 in layers without experts.
    None: experts are not compared (fp32, a given tolerance, or a model without experts)."""
    limit: ProbeLimit

    def difference(self, theirs: Sequence[Sequence[float]]) -> ProbeDifference:
        """Return the difference of a server's logprobs from the trainer's."""
        return difference_of(self.logprobs_NT, theirs, self.experts_NTLK)


def probe_sequences(count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the first `count` sequences for a vocabulary size; they are the same in every process."""
    generator = random.Random(20260000)
    return [tuple(generator.randrange(vocab_size) for _ in range(SEQUENCE_TOKENS)) for _ in range(count)]


class Probe:
    """Probe sequences, and the trainer's logprobs of them."""

    def __init__(
        self, chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig, dtype: str = "auto", *, in_fp8: bool = False
    ) -> None:
        """Create the probe. `dtype`: type of the server's weights (rl.engine.dtype); `auto`: the trainer's; `in_fp8`:
        servers have matrices in fp8 blocks, and the trainer computes with what these represent.
        """
        self._chunks, self._mesh, self._model = list(chunks), mesh, model
        self._device = next(chunks[0].parameters()).device
        # The lowest precision that the trainer or its servers use; None if both compute in fp32.
        used = {parameter.dtype for chunk in chunks for parameter in chunk.parameters()}
        if dtype != "auto":
            used.add(DTYPES[dtype])
        self._rounded_to = max(used - {torch.float32}, key=lambda each: torch.finfo(each).eps, default=None)
        blocks = BlockRounding(chunks, mesh, model) if in_fp8 else None
        self._weights: Callable[[], AbstractContextManager[None]] = blocks.weights if blocks else nullcontext
        self._inputs: Callable[[], AbstractContextManager[None]] = blocks.inputs if blocks else nullcontext
        self._is_exact = self._rounded_to is None and not in_fp8
        self._fewest_tokens = 1 if self._is_exact else FEWEST_EXPERT_TOKENS
        self.sequences = probe_sequences(FEWEST if self._is_exact else MOST, model.vocab_size)
        self.num_unreached = 0
        """Number of experts, over all layers, that too few tokens reach even with MOST sequences. The probe does not
        notice wrong weights in only these experts."""

    def reference(self, tolerance: float | None = None) -> ProbeReference:
        """Collective over the world: return the trainer's side, under the current weights. `tolerance` replaces the
        limit and disables the comparison of experts. In fp32, sequences are added, up to MOST and also for later calls,
        while an expert is not reached.
        """
        while True:
            logprobs_NT, experts_NTLK = self._pass(self.sequences)
            if self._model.is_moe:
                counts_LE = tokens_of_experts(experts_NTLK.flatten(0, 1), self._model.moe.num_experts)
                is_few_LE = counts_LE[torch.tensor(self._model.moe_layers)] < self._fewest_tokens
                self.num_unreached = int(is_few_LE.sum())
            if not self.num_unreached or len(self.sequences) >= MOST:
                break
            self.sequences = probe_sequences(min(MOST, 2 * len(self.sequences)), self._model.vocab_size)
        if self._is_exact:
            return ProbeReference(logprobs_NT=logprobs_NT, experts_NTLK=None, limit=probe_limit(None, tolerance))
        with _rounding(self._chunks, self._rounded_to) if self._rounded_to else nullcontext(), self._inputs():
            rounded_NT, _ = self._pass(self.sequences)
        rounding_nats = float((rounded_NT - logprobs_NT).abs().mean())
        return ProbeReference(
            logprobs_NT=logprobs_NT,
            experts_NTLK=experts_NTLK if self._model.is_moe and tolerance is None else None,
            limit=probe_limit(rounding_nats, tolerance),
        )

    def logprobs(self, sequences: Sequence[Sequence[int]] = (), sampling: Sampling = PLAIN) -> Tensor:
        """Collective over the world: return only the logprobs `[N, T - 1]`, of other sequences than the probe's too."""
        return self._pass(sequences or self.sequences, sampling)[0]

    @torch.no_grad()
    def _pass(self, sequences: Sequence[Sequence[int]], sampling: Sampling = PLAIN) -> tuple[Tensor, Tensor]:
        """Collective over the world: return the logprobs `[N, T - 1]` and the experts `[N, T - 1, L, K]`."""
        mesh, model = self._mesh, self._model
        samples = {
            index: TrainedSample(
                tokens_T=torch.tensor(tokens),
                rollout_logprobs_C=torch.zeros(len(tokens) - 1),
                shape=SampleShape(
                    replica_rank=0, num_prompt_tokens=1, num_completion_tokens=len(tokens) - 1, is_trained=True
                ),
            )
            for index, tokens in enumerate(sequences)
        }
        zigzag = mesh.config.zigzag
        multiple = lcm(zigzag, mesh.tp.size * mesh.cp.size if mesh.sequence_parallel else 1, LENGTH_MULTIPLE)
        longest = padded(PACKED * padded(SEQUENCE_TOKENS - 1, zigzag), multiple)
        limits = limits_on(mesh, longest, multiple)
        rows = [list(samples)[start : start + PACKED] for start in range(0, len(samples), PACKED)]
        rows += [[]] * (-len(rows) % limits.microbatch_multiple)
        microbatches = [make_microbatch(samples, row, limits, mesh.cp, self._device) for row in rows]
        vocab_size, temperature = sampling.vocab_size or model.vocab_size, sampling.cut.temperature
        head = _FullLogits(LogprobHead(mesh, vocab_size, temperature=temperature, chunk_tokens=1024))
        shape = len(samples), SEQUENCE_TOKENS - 1
        # int32: NCCL has no 16-bit integers, and 8 bits are too few.
        experts_NTLK = torch.full(
            (*shape, model.num_layers, model.moe.top_k if model.is_moe else 0), -1, dtype=torch.int32
        ).to(self._device)
        tokens = [local_tokens(layout_of(microbatch), mesh) for microbatch in microbatches]
        with (
            evaluating(self._chunks),
            without_capacity(self._chunks),
            self._weights(),
            _recorded(self._chunks, tokens, experts_NTLK) as routing,
        ):
            outputs = run_pass(self._chunks, microbatches, head, backward=False, routing=routing)
        logprobs_NT = torch.zeros(shape, dtype=torch.float64, device=self._device)
        # Tensor- and data-parallel ranks have the same numbers: only the first rank's are added.
        if mesh.tp.rank == 0 and mesh.dp.rank == 0:
            for microbatch, output in zip(microbatches, outputs, strict=False):
                mask_T = microbatch.completion_mask_T
                indices = torch.tensor(microbatch.samples, device=self._device)
                rows_T = indices[microbatch.sequence_T[mask_T]]
                positions_T = microbatch.place_T[mask_T]
                logprobs_NT[rows_T, positions_T] = output["logprobs"][mask_T].double()
        dist.all_reduce(logprobs_NT, group=mesh.world.group)
        # Each rank has only the experts of its layers and tokens.
        dist.all_reduce(experts_NTLK, op=dist.ReduceOp.MAX, group=mesh.world.group)
        return logprobs_NT.cpu(), experts_NTLK.cpu()


class _FullLogits(PassHead):
    """A head that makes the model compute full logits as a tensor, so that `_rounding` can round them."""

    def __init__(self, head: LogprobHead) -> None:
        self._head = head

    def __call__(self, microbatch: PolicyMicrobatch, output: Logits) -> HeadOutput:
        return self._head(microbatch, output)


@contextmanager
def _recorded(chunks: Sequence[nn.Module], tokens: Sequence[LocalTokens], experts_NTLK: Tensor) -> Iterator[Routing]:
    """Yield a routing for `run_pass` that writes this rank's choices (`tokens`: by microbatch) to `experts_NTLK`."""
    device, top_k = experts_NTLK.device, experts_NTLK.shape[3]
    current: list[LocalTokens] = []

    def writer(layer: int) -> Callable[..., None]:
        def write(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            here = current[-1]
            is_real_t = here.is_real_t
            samples_N = torch.tensor((*here.samples, -1))
            rows_t, positions_t = samples_N[here.sample_index_t][is_real_t], here.position_t[is_real_t]
            chosen_tK = output[1][is_real_t.to(device)].int().topk(top_k).indices
            experts_NTLK[rows_t.to(device), positions_t.to(device), layer] = chosen_tK.int()

        return write

    @contextmanager
    def routing(chunk: nn.Module, index: int) -> Iterator[None]:
        current.append(tokens[index])
        try:
            yield
        finally:
            current.pop()

    hooks = [
        router.register_forward_hook(writer(layer)) for chunk in chunks for layer, router in replayed_routers(chunk)
    ]
    try:
        yield routing
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _rounding(chunks: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Round all activations to `dtype`; perturb those already in it at random by the difference of two roundings."""
    generator = torch.Generator(next(chunks[0].parameters()).device).manual_seed(0)

    def other(value: Any) -> Any:
        if isinstance(value, tuple):
            others = map(other, value)
            return value._make(others) if hasattr(value, "_make") else tuple(others)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if torch.finfo(value.dtype).eps < torch.finfo(dtype).eps:
            return value.to(dtype).to(value.dtype)
        first, second = torch.rand((2, *value.shape), generator=generator, device=value.device)
        # A third of eps moves logprobs about as much as rounding the activations of an fp32 trainer does.
        return (value.float() * (1 + torch.finfo(dtype).eps / 3 * (first - second))).to(value.dtype)

    def is_rounded(module: nn.Module) -> bool:
        # The angles of a rotary embedding are never rounded. A layer's output includes the sum with the residual.
        if isinstance(module, RotaryEmbedding | Adapter):
            return False
        is_leaf = all(isinstance(child, Adapter) for child in module.children())
        return isinstance(module, TransformerLayer) or is_leaf

    hooks = [
        module.register_forward_hook(lambda module, inputs, output: other(output))
        for chunk in chunks
        for module in chunk.modules()
        if is_rounded(module)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
