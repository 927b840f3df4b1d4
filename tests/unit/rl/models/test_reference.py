"""A reference policy stays as long as a checkpoint needs it: a run that resumes from it reads the reference of then."""

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.loss import GrpoLoss
from mcore_rl.rl.models.reference import ReferencePass, forget_references
from mcore_rl.train.state import Progress


@pytest.mark.parametrize(
    ("checkpoints", "left"),
    [
        # Refreshed every 3 steps, saved every 10 with keep = 2: the newest two references are of 15 and 12.
        (["iter_0000005", "iter_0000010"], [3, 9, 18]),
        (["iter_0000010", "writing_0000016_18a3f"], [9, 15, 18]),
        (["iter_0000000", "iter_0000017", "damaged_iter_0000013_0", "deleting_iter_0000007_0"], [0, 15, 18]),
        ([], [18]),
    ],
    ids=["interval", "being_written", "damaged", "none"],
)
def test_the_reference_that_a_kept_checkpoint_needs_stays(checkpoints, left, tmp_path):
    references = tmp_path / "reference"
    for step in range(0, 19, 3):
        (references / f"step_{step:07d}").mkdir(parents=True)
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    forget_references(references, tmp_path / "checkpoints", 18)
    assert sorted(path.name for path in references.iterdir()) == [f"step_{step:07d}" for step in left]


@pytest.mark.parametrize(("kl_target", "adapted", "expected"), [(6.0, 0.7, 0.7), (6.0, None, 0.2), (None, 0.7, 0.2)])
def test_the_coefficient_is_the_configs_once_no_target_adapts_it(kl_target, adapted, expected):
    """A run that resumes may have left out its target, after this has moved the coefficient."""
    loss = GrpoLoss(kl_coeff=0.2, kl_target=kl_target)
    state: Any = SimpleNamespace(progress=Progress(kl_coeff=adapted))
    nothing: Any = None
    found = ReferencePass(nothing, loss, ReplayConfig(), nothing, nothing, state, updates_per_rollout=1)
    assert found.coeff == expected
