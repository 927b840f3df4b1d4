"""The one door to Megatron's pipeline schedules: every forward and backward pass of the project goes through it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

Routing = Callable[[nn.Module, int], AbstractContextManager[None]]
"""Entered around one chunk's forward of one microbatch: it decides who picks the experts."""


class PassInput(Protocol):
    """One microbatch as this rank's chunks read it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and full (not context-parallel) length, which the pipeline's messages have."""
        ...

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Keyword arguments of the chunk's forward."""
        ...


MAX = "max/"
"""Begins the names of kept numbers of which the world's largest is wanted; of all others it is the sum."""


Input = TypeVar("Input", bound=PassInput, contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOutput:
    """A loss as a sum and a count (divided once, by the world's count), and what to keep of the microbatch."""

    loss: Tensor
    count: Tensor
    kept: dict[str, Tensor]


class Head(Protocol[Input]):
    """What is made of the last stage's output: a training objective, logprobs, scores."""

    wants_losses: bool
    """The model is given labels and returns a loss per token `[B, S]`; otherwise logits `[B, S, v]`."""

    def __call__(self, microbatch: Input, output: Tensor) -> HeadOutput:
        """The head's value on one microbatch of this rank."""
        ...


def free_routing(chunk: nn.Module, index: int) -> AbstractContextManager[None]:
    """Every router chooses for itself."""
    return nullcontext()


def run_pass(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[Input],
    head: Head[Input],
    *,
    backward: bool,
    routing: Routing = free_routing,
) -> list[dict[str, Tensor]]:
    """Collective over the mesh: what `head` kept of each microbatch, in order, on the last stage; [] on others.

    With `backward`, gradients are summed over the microbatches, reduced over the mesh and divided by the
    world's count (Megatron's finalize_model_grads, set in the chunks' config).
    """

    def forward_step(queue: Iterator[tuple[int, Input]], chunk: nn.Module) -> tuple[Tensor, Any]:
        index, microbatch = next(queue)
        with routing(chunk, index):
            output = chunk(**microbatch.model_inputs(with_labels=head.wants_losses))
        return output, partial(_as_megatron, head, microbatch)

    rows, length = microbatches[0].shape
    queues = [iter(enumerate(microbatches)) for _ in chunks]  # every chunk reads every microbatch
    single = len(chunks) == 1
    kept: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=queues[0] if single else queues,
        model=chunks[0] if single else list(chunks),
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=not backward,
    )
    return kept


def _as_megatron(
    head: Head[Input], microbatch: Input, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    result = head(microbatch, output)
    return result.loss, result.count, result.kept
