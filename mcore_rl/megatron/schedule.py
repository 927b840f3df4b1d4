"""The one door to Megatron's pipeline schedules: every pass of training, logprobs and scoring goes through it.

The rollout engine, which generates token by token over a cache, has its own loop (rl/engines/native).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_rl.megatron.routers import routers
from mcore_rl.megatron.vocab import last_tensor

Routing = Callable[[nn.Module, int], AbstractContextManager[None]]
"""Context for the forward of one chunk on one microbatch, by index: inside, it decides which experts tokens go to."""


class PassInput(Protocol):
    """One microbatch as this rank's chunks read it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and their full (not context-parallel) length, from which Megatron derives its messages' shape."""
        ...

    @property
    def routed_tokens(self) -> Tensor | int:
        """Number of positions on this context-parallel rank that are no padding."""
        ...

    @property
    def packed_spans(self) -> tuple[Tensor, int] | None:
        """Sequence index of each position of a packed row, `[s]`, -1 at padding, and their number; None: not packed."""
        ...

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Return the keyword arguments of the chunk's forward."""
        ...


MAX = "max/"
"""Prefix of the names of outputs that are reduced over the world by their maximum; other outputs are summed."""
SIGNAL = MAX + "signal"
"""Name of the output of `signal_of`."""
SMALLEST_SIGNAL = 1e-12
"""Gradient below which squares of the gradients behind it may be 0 in float32."""

Input = TypeVar("Input", bound=PassInput, contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOutput:
    """Result of a head on one microbatch of this rank."""

    loss: Tensor
    """Sum of the loss over the counted tokens, a scalar; divided once, by the world's count."""
    count: Tensor
    """Number of counted tokens, an integer scalar, from the head's `count`."""
    outputs: dict[str, Tensor]
    """Tensors without gradient that `run_pass` returns."""


class Head(Protocol[Input]):
    """Function of the last stage's output: a training objective, logprobs, scores."""

    wants_losses: bool
    """Whether the model is given labels and returns losses `[B, s]`; otherwise it returns logits `[B, s, v]`."""

    def count(self, microbatch: Input) -> Tensor:
        """Return the number of tokens of one microbatch of this rank that the loss counts, an integer scalar."""
        ...

    def __call__(self, microbatch: Input, output: Any) -> HeadOutput:
        """Return loss and outputs of a microbatch; a `ReadsDeferredLogits` is handed deferred logits, not a tensor."""
        ...


class ReadsDeferredLogits:
    """A head that also takes `DeferredLogits` `[B, s, v]` in the place of logits."""


def signal_of(numbers: Tensor) -> dict[str, Tensor]:
    """Return the output by which a step knows that its loss moves `numbers`, on which it depends: logprobs or scores.

    It is 0 until the backward, and then 1 where a number's gradient is not 0; without any gradient it is 1.
    """
    has_signal = numbers.new_zeros((), dtype=torch.float32)

    def note(gradient: Tensor) -> None:
        has_signal.copy_((gradient.abs() > SMALLEST_SIGNAL).any())

    if numbers.requires_grad:
        numbers.register_hook(note)
    elif torch.is_grad_enabled():
        has_signal.fill_(1)
    return {SIGNAL: has_signal}


def free_routing(chunk: nn.Module, index: int) -> AbstractContextManager[None]:
    """Let every router choose its experts."""
    return nullcontext()


def run_pass(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[Input],
    head: Head[Input],
    *,
    backward: bool,
    routing: Routing = free_routing,
) -> list[dict[str, Tensor]]:
    """Collective over the mesh: run all microbatches through the pipeline, and backward if asked. Returns the head's
    outputs of each microbatch on the last stage; [] on other stages.

    Microbatches have one shape, and as many are on every data-parallel rank. Gradients are summed over microbatches,
    reduced over the mesh and divided by the world's count (Megatron's finalize_model_grads). `routing` is the context
    of each chunk's forward, which may impose or record routes.
    """
    found = {chunk: [router for _, router in routers(chunk)] for chunk in chunks}
    options = {"defers_logits": True} if isinstance(head, ReadsDeferredLogits) else {}

    def forward_step(queue: Iterator[tuple[int, Input]], chunk: nn.Module) -> tuple[Any, Any]:
        index, microbatch = next(queue)
        _name_sequences(found[chunk], microbatch)
        with routing(chunk, index):
            output = chunk(**microbatch.model_inputs(with_labels=head.wants_losses), **options)
        tensor = last_tensor(output)
        if tensor.requires_grad and microbatch.packed_spans is not None:
            # The gradient of the output arrives before anything of this microbatch is recomputed.
            tensor.register_hook(lambda _: _name_sequences(found[chunk], microbatch))
        return output, partial(_apply_head, head, microbatch)

    num_sequences, length = microbatches[0].shape
    # With interleaving every chunk reads every microbatch, and Megatron advances each chunk's iterator by itself.
    queues = [iter(enumerate(microbatches)) for _ in chunks]
    single = len(chunks) == 1
    with _router_losses(found.values(), microbatches, head if backward else None):
        outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=queues[0] if single else queues,
            model=chunks[0] if single else list(chunks),
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=num_sequences,
            forward_only=not backward,
        )
    return outputs


@contextmanager
def _router_losses(
    found: Iterable[Sequence[TopKRouter]], microbatches: Sequence[Input], head: Head[Input] | None
) -> Iterator[None]:
    """Collective over the ranks of a stage: the weight of the routers' losses in a pass with the backward of `head`.

    They are sums over all routed tokens; the schedule divides gradients by the number of counted tokens.
    """
    all_routers = [router for routers_of_chunk in found for router in routers_of_chunk]
    if head is not None and any(
        router.is_aux_loss_enabled() or router.config.moe_z_loss_coeff for router in all_routers
    ):
        # float32 counts exactly up to 2^24 alone, which a large batch exceeds.
        totals = torch.zeros(2, dtype=torch.float64, device=all_routers[0].weight.device)
        for microbatch in microbatches:
            totals[0] += head.count(microbatch)
            totals[1] += microbatch.routed_tokens
        # The group also has the tensor-parallel ranks, which count the same tokens: the ratio is the same.
        dist.all_reduce(totals, group=all_routers[0].tp_dp_cp_group)
        # Divided by the counted tokens in the end, a sum over routed tokens with this weight is their mean.
        for router in all_routers:
            router.loss_weight = (totals[0] / totals[1].clamp(min=1)).float()
    try:
        yield
    finally:
        for router in all_routers:
            router.loss_weight, router.packed_spans_T = 1.0, None


def _name_sequences(found: Sequence[TopKRouter], microbatch: PassInput) -> None:
    spans = microbatch.packed_spans
    for router in found:
        router.packed_spans_T = None
        if spans is not None:
            spans_s, router.num_packed_spans = spans
            # Under sequence parallelism a rank's routers see its part of the positions.
            parts = router.tp_group.size() if router.config.sequence_parallel else 1
            router.packed_spans_T = spans_s.chunk(parts)[router.tp_group.rank() if parts > 1 else 0]


def _apply_head(head: Head[Input], microbatch: Input, output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    # Three values tell Megatron that the loss is a sum: it divides by the count of all ranks, not by microbatches.
    result = head(microbatch, output)
    return result.loss, result.count, result.outputs
