"""Training objectives as heads of a pass."""

import torch
from torch import Tensor

from mcore_rl.megatron.schedule import HeadOutput
from mcore_rl.model.inputs import LocalMicrobatch


class NextTokenHead:
    """Cross entropy of the next token, summed over tokens in the loss mask."""

    wants_losses = True

    def count(self, microbatch: LocalMicrobatch) -> Tensor:
        """Return the number of tokens in the loss mask."""
        return microbatch.loss_mask_Bs.sum().to(torch.int)

    def __call__(self, microbatch: LocalMicrobatch, output: Tensor) -> HeadOutput:
        """Return the loss in nats and the number of tokens; `output` is the loss of each token, `[B, s]`."""
        mask_Bs = microbatch.loss_mask_Bs.float()
        loss = (output.float() * mask_Bs).sum()
        outputs = {"loss": loss.detach(), "count": mask_Bs.sum()}
        return HeadOutput(loss=loss, count=self.count(microbatch), outputs=outputs)
