"""A pass over the policy's modules that computes logprobs, without gradient."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from mcore_rl.megatron.schedule import Routing, run_pass
from mcore_rl.replay.witness import proving
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.passes.batch import Minibatch, PolicyMicrobatch
from mcore_rl.rl.passes.heads import LogprobHead

RoutedPass = Callable[[Sequence[PolicyMicrobatch]], AbstractContextManager[Routing]]
"""Context manager for the routing of one pass over these microbatches: a method of `PolicyRoutes`."""


class PolicyLogprobs:
    """Computes logprobs under the current weights of the policy's modules."""

    def __init__(self, chunks: Sequence[nn.Module], head: LogprobHead, *, is_moe: bool) -> None:
        """Take the policy's modules and its logprob head; only a mixture of experts (`is_moe`) has routes to prove."""
        self.head = head
        self._chunks, self._is_moe = chunks, is_moe

    @torch.no_grad()
    def of(self, minibatch: Minibatch, routed: RoutedPass, *, is_imposed: bool) -> list[Tensor]:
        """Collective over the world: return logprobs `[T]` of each microbatch, on the last stage only.

        Args:
            minibatch: the samples.
            routed: opens the routing context of the pass.
            is_imposed: whether this routing imposes routes, which the pass then has to prove.
        """
        chunks, microbatches = self._chunks, minibatch.microbatches
        with evaluating(chunks), routed(microbatches) as routing, self.proving(is_imposed=is_imposed):
            outputs = run_pass(chunks, microbatches, self.head, backward=False, routing=routing)
        return [output["logprobs"] for output in outputs]

    def added(self, minibatch: Minibatch, field: str, routed: RoutedPass, *, is_imposed: bool) -> Minibatch:
        """Collective over the world: return the minibatch with the logprobs in `field`."""
        if not minibatch.num_samples:
            return minibatch
        return minibatch.with_numbers(field, self.of(minibatch, routed, is_imposed=is_imposed))

    def proving(self, *, is_imposed: bool) -> AbstractContextManager[None]:
        """Context that proves that the pass inside imposes routes, or imposes none; a dense model needs no proof."""
        return proving(self._chunks, is_imposed=is_imposed) if self._is_moe else nullcontext()
