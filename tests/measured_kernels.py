"""What a CPU's kernels are measured to be, once for all processes that the server forks which has imported this module:
a tenth of a second that each of them would need, and of two runs that are compared both compute alike.
"""

import os
import pickle
from contextlib import closing
from typing import get_args

import torch

from mcore_rl.backend.cpu import choice
from mcore_rl.config.run import PlatformConfig


def measure_elsewhere() -> None:
    """Have another process measure: autograd refuses to work in forks of one that has computed gradients."""
    reader, writer = os.pipe()
    measuring = os.fork()
    if measuring == 0:
        try:
            torch.set_num_threads(1)
            for precision in get_args(PlatformConfig.model_fields["precision"].annotation):
                choice.choose(PlatformConfig(precision=precision), 1)
            os.write(writer, pickle.dumps(choice.measurements()))
        finally:
            os._exit(0)
    os.close(writer)
    with closing(os.fdopen(reader, "rb")) as answer:
        choice.measurements().update(pickle.load(answer))
    os.waitpid(measuring, 0)


measure_elsewhere()
