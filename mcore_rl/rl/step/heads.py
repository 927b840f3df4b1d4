"""Output heads of passes over the policy or critic: logprobs or values of completion tokens, or an update's loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import MAX, Head, HeadOutput, ReadsDeferredLogits, signal_of
from mcore_rl.megatron.vocab import (
    IGNORED_TARGET,
    Logits,
    TokenStatistics,
    logprobs_and_entropy,
    reverse_kl,
    vocabulary_logprobs,
)
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.rl.step.advantages import clipped_value_loss
from mcore_rl.rl.step.batch import PolicyMicrobatch
from mcore_rl.rl.step.losses import LOG_RATIO_LIMIT, Objective, PolicyTokens, policy_loss


class LogprobHead(ReadsDeferredLogits):
    """Outputs `logprobs` `[T]` of completion tokens at the sampling temperature, in nats; zeros elsewhere.

    Completions that are not trained on are included: a KL in the reward applies to every completion of a group.
    """

    wants_losses = False

    def __init__(self, mesh: Mesh, vocab_size: int, *, temperature: float, chunk_tokens: int) -> None:
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def logprobs_and_entropy(self, microbatch: PolicyMicrobatch, output: Logits, mask_T: Tensor) -> TokenStatistics:
        """Collective over the tensor-parallel ranks: compute logprobs and entropy `[T]` from logits `[1, T, v]` where
        the mask is True; zeros elsewhere.
        """
        targets_T = microbatch.inputs.labels_Bs[0].where(mask_T, IGNORED_TARGET)
        return logprobs_and_entropy(
            output[0],
            targets_T,
            self._mesh.tp,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
        )

    def vocabulary(self, microbatch: PolicyMicrobatch, output: Logits) -> Tensor:
        """Collective over the tensor-parallel ranks: compute logprobs `[N, v]` over this rank's slice of the vocabulary
        at positions that predict a sampled completion token, float32 in main memory.
        """
        rows_N = microbatch.completion_mask_T.nonzero().flatten()
        return vocabulary_logprobs(
            output[0],
            rows_N,
            self._mesh.tp,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
        ).cpu()

    def teacher_kl(self, microbatch: PolicyMicrobatch, output: Logits) -> Tensor | None:
        """Collective over the tensor-parallel ranks: compute KL(policy || teacher) over the vocabulary, `[T]` with
        gradient; None if the microbatch has no `teacher_vocabulary_Nv`.
        """
        if microbatch.teacher_vocabulary_Nv is None:
            return None
        return reverse_kl(
            output[0],
            microbatch.teacher_vocabulary_Nv,
            microbatch.completion_mask_T.nonzero().flatten(),
            self._mesh.tp,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            limit_nats=LOG_RATIO_LIMIT,
        )

    def count(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return 0: there is no loss."""
        return microbatch.mask_T.new_zeros((), dtype=torch.int)

    def __call__(self, microbatch: PolicyMicrobatch, output: Logits) -> HeadOutput:
        """Return the logprobs of one microbatch; there is no loss."""
        logprobs_T = self.logprobs_and_entropy(microbatch, output, microbatch.completion_mask_T).logprobs_T.detach()
        zero = logprobs_T.new_zeros((), dtype=torch.float32)
        return HeadOutput(loss=zero, count=zero.int(), outputs={"logprobs": logprobs_T})


class TeacherHead(ReadsDeferredLogits):
    """Outputs a teacher's `logprobs` `[T]` of completion tokens and, if asked, its logprobs over the `vocabulary`."""

    wants_losses = False

    def __init__(self, logprobs: LogprobHead, *, vocabulary: bool) -> None:
        """Take the head of the policy's logprobs, for the same tokens and temperature."""
        self._logprobs = logprobs
        self._vocabulary = vocabulary

    def count(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return 0: there is no loss."""
        return self._logprobs.count(microbatch)

    def __call__(self, microbatch: PolicyMicrobatch, output: Logits) -> HeadOutput:
        """Return the logprobs of one microbatch; there is no loss."""
        found = self._logprobs(microbatch, output)
        if self._vocabulary:
            found.outputs["vocabulary"] = self._logprobs.vocabulary(microbatch, output)
        return found


class PolicyHead(ReadsDeferredLogits):
    """Computes the policy's loss from the logprobs of `LogprobHead`.

    A microbatch without old logprobs is on-policy: its ratios are 1, with the gradient of the policy.
    """

    wants_losses = False

    def __init__(
        self,
        logprobs: LogprobHead,
        mesh: Mesh,
        objective: Objective,
        router_shift: Callable[[], Tensor] | None = None,
        trace: Callable[[PolicyMicrobatch, Tensor], None] | None = None,
    ) -> None:
        """Prepare the head.

        Args:
            logprobs: the head that computes logprobs.
            mesh: the mesh.
            objective: the terms of the loss.
            router_shift: returns the router-shift ratio `[T]` of the next microbatch at each call; None: it is 1.
            trace: takes each microbatch with its logprobs `[T]`, to show some of them; None: nothing is shown.
        """
        self._logprobs = logprobs
        self._mesh = mesh
        self._objective = objective
        self._router_shift = router_shift
        self._trace = trace

    def count(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return the number of trained tokens."""
        return microbatch.mask_T.sum().to(torch.int)

    def __call__(self, microbatch: PolicyMicrobatch, output: Logits) -> HeadOutput:
        """Return the loss of one microbatch, with the sums and maxima of `update_statistics` as outputs."""
        assert microbatch.advantages_T is not None and microbatch.loss_weights_T is not None
        logprobs_T, entropy_T = self._logprobs.logprobs_and_entropy(microbatch, output, microbatch.mask_T)
        old_logprobs_T = microbatch.old_logprobs_T
        tokens = PolicyTokens(
            logprobs_T=logprobs_T,
            # Without an entropy bonus the entropy is only reported, and its backward would cost a pass over the logits.
            entropy_T=entropy_T if self._objective.entropy_coeff else entropy_T.detach(),
            old_logprobs_T=logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T,
            reference_logprobs_T=microbatch.reference_logprobs_T,
            rollout_logprobs_T=microbatch.rollout_logprobs_T,
            advantages_T=microbatch.advantages_T,
            mask_T=microbatch.mask_T,
            loss_weights_T=microbatch.loss_weights_T,
            sequence_T=microbatch.sequence_T,
            lengths_N=microbatch.lengths_N,
            router_shift_T=None if self._router_shift is None else self._router_shift(),
            teacher_logprobs_T=microbatch.teacher_logprobs_T,
            teacher_kl_T=self._logprobs.teacher_kl(microbatch, output),
            is_stale_T=microbatch.is_stale_T,
        )
        if self._trace is not None:
            self._trace(microbatch, logprobs_T)
        loss = policy_loss(tokens, self._objective, self._mesh.cp)
        maxima = {MAX + name: value.detach() for name, value in loss.maxima.items()}
        outputs = loss.sums | maxima | signal_of(logprobs_T)
        return HeadOutput(loss=loss.loss, count=loss.count, outputs=outputs)


class MixedHead(ReadsDeferredLogits):
    """Computes the policy's loss on completions and the cross entropy on the texts that follow them (PTX).

    Each loss is averaged over its own tokens. The schedule divides both by the number of completion tokens, so the sum
    over the texts is first multiplied by the ratio of the two numbers.
    """

    wants_losses = False

    def __init__(
        self, policy: Head[PolicyMicrobatch], mesh: Mesh, *, vocab_size: int, chunk_tokens: int, weight: float
    ) -> None:
        """Prepare one optimizer step.

        Args:
            policy: the policy's loss.
            mesh: the mesh.
            vocab_size: size of the tokenizer's vocabulary; larger ids have no probability.
            chunk_tokens: number of positions with logits in fp32 at a time.
            weight: rl.ptx.coeff x completion tokens / text tokens, trained tokens of the world.
        """
        self._policy = policy
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._weight = weight
        self._without_completions: dict[str, Tensor] = {}

    def count(self, microbatch: PolicyMicrobatch | LocalMicrobatch) -> Tensor:
        """Return the number of trained completion tokens."""
        if isinstance(microbatch, PolicyMicrobatch):
            return self._policy.count(microbatch)
        return microbatch.loss_mask_Bs.new_zeros((), dtype=torch.int)

    def __call__(self, microbatch: PolicyMicrobatch | LocalMicrobatch, output: Logits) -> HeadOutput:
        """Return the loss of one microbatch, with `PolicyHead`'s outputs and the sum and count of the cross entropy."""
        if isinstance(microbatch, PolicyMicrobatch):
            result = self._policy(microbatch, output)
            self._without_completions = {
                name: torch.full_like(value, -torch.inf if name.startswith(MAX) else 0)
                for name, value in result.outputs.items()
            }
            zero = result.loss.detach().new_zeros(())
            result.outputs.update({"ptx_loss": zero, "ptx_count": zero})
            return result
        mask_T = microbatch.loss_mask_Bs[0]
        logprobs_T, _ = logprobs_and_entropy(
            output[0],
            microbatch.labels_Bs[0].where(mask_T > 0, IGNORED_TARGET),
            self._mesh.tp,
            vocab_size=self._vocab_size,
            temperature=1.0,
            chunk_tokens=self._chunk_tokens,
        )
        loss = -(logprobs_T * mask_T).sum()
        # A rank's first microbatches are completions; their statistics are zero (or -inf for maxima) for texts.
        outputs = self._without_completions | {"ptx_loss": loss.detach(), "ptx_count": mask_T.sum()}
        return HeadOutput(loss=self._weight * loss, count=self.count(microbatch), outputs=outputs)


class ValueHead:
    """Outputs `values` `[T]`, float32: the critic's score at each position, before it sees the predicted token."""

    wants_losses = False

    def count(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return 0: there is no loss."""
        return microbatch.mask_T.new_zeros((), dtype=torch.int)

    def __call__(self, microbatch: PolicyMicrobatch, output: Tensor) -> HeadOutput:
        """Return the values of one microbatch, from scores `[1, T, 1]`; there is no loss."""
        zero = output.new_zeros((), dtype=torch.float32)
        return HeadOutput(loss=zero, count=zero.int(), outputs={"values": output[0, :, 0].detach().float()})


class ValueLossHead:
    """Computes the clipped squared error of the critic's values, averaged over all trained tokens."""

    wants_losses = False

    def __init__(self, clip: float | None) -> None:
        """Take rl.advantage.critic.clip_value; None: values are not clipped."""
        self._clip = clip

    def count(self, microbatch: PolicyMicrobatch) -> Tensor:
        """Return the number of trained tokens, as for the policy's loss."""
        return microbatch.mask_T.sum().to(torch.int)

    def __call__(self, microbatch: PolicyMicrobatch, output: Tensor) -> HeadOutput:
        """Return the loss of one microbatch from scores `[1, T, 1]`, with the loss and clipped tokens as outputs."""
        assert microbatch.values_T is not None and microbatch.returns_T is not None
        values_T = output[0, :, 0].float()
        loss_T, is_clipped_T = clipped_value_loss(values_T, microbatch.values_T, microbatch.returns_T, self._clip)
        loss = loss_T.where(microbatch.mask_T, 0.0).sum()
        count = self.count(microbatch)
        clipped = (is_clipped_T & microbatch.mask_T).sum()
        outputs = {"loss": loss.detach(), "count": count, "clipped": clipped} | signal_of(values_T)
        return HeadOutput(loss=loss, count=count, outputs=outputs)
