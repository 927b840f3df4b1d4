"""What a pass makes of the policy's logits: logprobs of what was said, or the objective of an update."""

import torch
from torch import Tensor

from mcore_rl.config.rl import LossConfig
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.schedule import MAX, HeadOutput
from mcore_rl.parallel.vocab import IGNORED_TARGET, TokenStatistics, logprobs_and_entropy
from mcore_rl.rl.batch import PolicyMicrobatch
from mcore_rl.rl.objectives.losses import policy_loss
from mcore_rl.rl.objectives.policy_tokens import PolicyTokens


class LogprobHead:
    """Keeps `logprobs` `[T]` of trained tokens under the tempered distribution; zeros elsewhere."""

    wants_losses = False

    def __init__(self, mesh: Mesh, vocab_size: int, *, temperature: float, chunk_tokens: int) -> None:
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def statistics(self, microbatch: PolicyMicrobatch, output: Tensor) -> TokenStatistics:
        """Collective over the tensor-parallel ranks: logprobs and entropy `[T]` from logits `[1, T, v]`."""
        targets_T = microbatch.inputs.labels_Bs[0].where(microbatch.mask_T, IGNORED_TARGET)
        return logprobs_and_entropy(
            output[0],
            targets_T,
            self._mesh.tp,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
        )

    def __call__(self, microbatch: PolicyMicrobatch, output: Tensor) -> HeadOutput:
        """See Head; there is no loss."""
        zero = output.new_zeros((), dtype=torch.float32)
        logprobs_T = self.statistics(microbatch, output).logprobs_T.detach()
        return HeadOutput(loss=zero, count=zero.int(), outputs={"logprobs": logprobs_T})


class PolicyHead:
    """The objective that rl.loss names, over the logprobs of `LogprobHead`.

    A microbatch without old logprobs is the old policy's own: its ratios are 1, with the policy's gradient.
    """

    wants_losses = False

    def __init__(self, logprobs: LogprobHead, mesh: Mesh, config: LossConfig) -> None:
        self._logprobs = logprobs
        self._mesh = mesh
        self._config = config

    def __call__(self, microbatch: PolicyMicrobatch, output: Tensor) -> HeadOutput:
        """See Head; the sums and maxima of `loss_metrics` are kept."""
        statistics = self._logprobs.statistics(microbatch, output)
        if not self._config.entropy_coeff:
            statistics = TokenStatistics(statistics.logprobs_T, statistics.entropy_T.detach())
        loss = policy_loss(policy_tokens(microbatch, statistics), self._config, self._mesh.cp)
        maxima = {MAX + name: value.detach() for name, value in loss.maxima.items()}
        return HeadOutput(loss=loss.loss, count=loss.count, outputs=loss.sums | maxima)


def policy_tokens(microbatch: PolicyMicrobatch, statistics: TokenStatistics) -> PolicyTokens:
    """What the objective is computed from."""
    old_T, advantages_T, weights_T = (
        microbatch.old_logprobs_T,
        microbatch.advantages_T,
        microbatch.weights_T,
    )
    assert advantages_T is not None and weights_T is not None, "the microbatch has no advantages yet"
    return PolicyTokens(
        logprobs_T=statistics.logprobs_T,
        entropy_T=statistics.entropy_T,
        old_logprobs_T=statistics.logprobs_T.detach() if old_T is None else old_T,
        reference_logprobs_T=microbatch.reference_logprobs_T,
        engine_logprobs_T=microbatch.engine_logprobs_T,
        advantages_T=advantages_T,
        mask_T=microbatch.mask_T,
        weights_T=weights_T,
        sequence_T=microbatch.sequence_T,
        lengths_N=microbatch.lengths_N,
    )
