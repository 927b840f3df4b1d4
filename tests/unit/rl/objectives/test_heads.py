"""Heads of passes over the policy, on given logits."""

import torch

from mcore_rl.data.plan import PackingLimits
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.batch import make_microbatch
from mcore_rl.rl.objectives.heads import LogprobHead
from tests.unit.rl.test_batch import ALONE, CPU, SAMPLES


def test_old_and_reference_logprobs_are_of_masked_completions_too(one_rank: Mesh) -> None:
    """A KL in the reward is paid by every completion of a group; sample 5 is masked."""
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=2)
    microbatch = make_microbatch(SAMPLES, [3, 5, 8], limits, ALONE, CPU)
    logits_1TV = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head = LogprobHead(one_rank, 30, temperature=0.7, chunk_tokens=4)
    wanted_TV = (logits_1TV[0, :, :30] / 0.7).log_softmax(-1)
    # Position by position: the label where a token of a completion is predicted.
    labels = {1: 21, 2: 22, 3: 23, 4: 24, 8: 25, 9: 26}
    wanted_T = torch.tensor([wanted_TV[t, labels[t]].item() if t in labels else 0.0 for t in range(12)])
    got_T = head(microbatch, logits_1TV).outputs["logprobs"]
    torch.testing.assert_close(got_T.float(), wanted_T, rtol=0, atol=1e-6)
