"""The one door to Megatron's pipeline schedules: every pass of training, logprobs and scoring goes through it.

The rollout engine, which generates token by token over a cache, has its own loop (rl/engines/native).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

Routing = Callable[[nn.Module, int], AbstractContextManager[None]]
"""Context for the forward of one chunk on one microbatch, by index: inside, it decides which experts tokens go to."""


class PassInput(Protocol):
    """One microbatch as this rank's chunks read it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and their full (not context-parallel) length, from which Megatron derives its messages' shape."""
        ...

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Return the keyword arguments of the chunk's forward."""
        ...


MAX = "max/"
"""Prefix of the names of outputs that are reduced over the world by their maximum; all others are summed."""

Input = TypeVar("Input", bound=PassInput, contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOutput:
    """Result of a head on one microbatch of this rank."""

    loss: Tensor
    """Sum of the loss over the counted tokens, a scalar; divided once, by the world's count."""
    count: Tensor
    """Number of counted tokens, an integer scalar."""
    outputs: dict[str, Tensor]
    """Tensors without gradient that `run_pass` returns."""


class Head(Protocol[Input]):
    """Function of the last stage's output: a training objective, logprobs, scores."""

    wants_losses: bool
    """Whether the model is given labels and returns losses `[B, s]`; otherwise it returns logits `[B, s, v]`."""

    def __call__(self, microbatch: Input, output: Tensor) -> HeadOutput:
        """Return the loss and the outputs of one microbatch of this rank."""
        ...


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
    """Collective over the mesh: run all microbatches through the pipeline, and backward if asked.

    Args:
        chunks: This rank's part of the model, in pipeline order.
        microbatches: This data-parallel rank's microbatches, of one shape and the same number on every rank.
        head: Loss and outputs, computed on the last pipeline stage.
        backward: Whether to compute gradients. They are summed over the microbatches, reduced over the mesh and
            divided by the world's count (Megatron's finalize_model_grads, set in the chunks' config).
        routing: Context of each chunk's forward of each microbatch, which may impose or record routes.

    Returns:
        The head's outputs of each microbatch, in order, on the last stage; [] on other stages.
    """

    def forward_step(queue: Iterator[tuple[int, Input]], chunk: nn.Module) -> tuple[Tensor, Any]:
        index, microbatch = next(queue)
        with routing(chunk, index):
            output = chunk(**microbatch.model_inputs(with_labels=head.wants_losses))
        return output, partial(_apply_head, head, microbatch)

    num_sequences, length = microbatches[0].shape
    # With interleaving every chunk reads every microbatch, and Megatron advances each chunk's iterator by itself.
    queues = [iter(enumerate(microbatches)) for _ in chunks]
    single = len(chunks) == 1
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


def _apply_head(
    head: Head[Input], microbatch: Input, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    # Three values tell Megatron that the loss is a sum: it divides by the count of all ranks, not by microbatches.
    result = head(microbatch, output)
    return result.loss, result.count, result.outputs
