"""A pass over the policy's modules that keeps logprobs, without gradient."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from mcore_rl.parallel.schedule import Routing, run_pass
from mcore_rl.replay.witness import proving
from mcore_rl.rl.engines.native.engine import evaluating
from mcore_rl.rl.passes.batch import Minibatch, PolicyMicrobatch
from mcore_rl.rl.passes.heads import LogprobHead

RoutedPass = Callable[[Sequence[PolicyMicrobatch]], AbstractContextManager[Routing]]
"""Opens the routing of one pass over these microbatches: a method of `PolicyRoutes`."""


class PolicyLogprobs:
    """Logprobs under the weights that the policy's modules have now."""

    def __init__(self, chunks: Sequence[nn.Module], head: LogprobHead, *, is_moe: bool) -> None:
        """Take the policy's modules and the head of its logprobs; only a mixture of experts has routes to prove."""
        self.head = head
        self._chunks, self._is_moe = chunks, is_moe

    @torch.no_grad()
    def of(self, minibatch: Minibatch, routed: RoutedPass, *, is_imposed: bool) -> list[Tensor]:
        """Collective over the world: return logprobs `[T]` of each microbatch; on the last stage only.

        Args:
            minibatch: the samples.
            routed: opens the routing of the pass.
            is_imposed: whether that routing imposes routes, of which there is a proof.
        """
        chunks, microbatches = self._chunks, minibatch.microbatches
        with evaluating(chunks), routed(microbatches) as routing, self.proving(is_imposed=is_imposed):
            outputs = run_pass(chunks, microbatches, self.head, backward=False, routing=routing)
        return [one["logprobs"] for one in outputs]

    def added(self, minibatch: Minibatch, field: str, routed: RoutedPass, *, is_imposed: bool) -> Minibatch:
        """Collective over the world: return the minibatch with the logprobs as `field`."""
        if not minibatch.num_samples:
            return minibatch
        return minibatch.with_numbers(field, self.of(minibatch, routed, is_imposed=is_imposed))

    def proving(self, *, is_imposed: bool) -> AbstractContextManager[None]:
        """Return a proof that the pass inside imposes routes, or none; dense models need none."""
        return proving(self._chunks, is_imposed=is_imposed) if self._is_moe else nullcontext()
