"""Each sample of a packed microbatch has the logprobs of its own prompt's teacher."""

import torch

from mcore_rl.data.packing import PackingLimits
from mcore_rl.rl.batch import make_microbatch
from mcore_rl.rl.models.teachers import with_outputs_of_teacher
from mcore_rl.rl.types import SampleShape
from tests.unit.rl.step.test_batch import ALONE, CPU, SAMPLES


def test_outputs_of_several_teachers_are_put_together_by_sample() -> None:
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=2)
    one = make_microbatch(SAMPLES, [3, 5, 8], limits, ALONE, CPU)
    taught_by = {3: 0, 5: 2, 8: 0}
    shapes = {
        index: SampleShape(
            replica_rank=0, num_prompt_tokens=1, num_completion_tokens=1, is_trained=True, teacher=teacher
        )
        for index, teacher in taught_by.items()
    }
    num_completion = int(one.completion_mask_T.sum())
    for teacher in (0, 2):
        # A number that tells teacher and position: 100 x teacher + position.
        logprobs_T = 100.0 * teacher + torch.arange(len(one.mask_T))
        output = {
            "logprobs": logprobs_T,
            "vocabulary": logprobs_T[one.completion_mask_T][:, None].expand(num_completion, 7),
        }
        one = with_outputs_of_teacher(one, output, shapes, teacher)
    rows = 0
    for t in one.completion_mask_T.nonzero().flatten().tolist():
        wanted = 100.0 * taught_by[one.samples[int(one.sequence_T[t])]] + t
        assert one.teacher_logprobs_T[t] == wanted
        assert one.teacher_vocabulary_Nv[rows].tolist() == [wanted] * 7
        rows += 1
    assert rows == num_completion > 0
