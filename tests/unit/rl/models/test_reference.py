"""A reference policy stays as long as a checkpoint needs it: a run that resumes from it reads the reference of then."""

from pathlib import Path

import pytest

from mcore_rl.rl.models.reference import forget_references


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
def test_the_reference_that_a_kept_checkpoint_needs_stays(
    checkpoints: list[str], left: list[int], tmp_path: Path
) -> None:
    references = tmp_path / "reference"
    for step in range(0, 19, 3):
        (references / f"step_{step:07d}").mkdir(parents=True)
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    forget_references(references, tmp_path / "checkpoints", 18)
    assert sorted(path.name for path in references.iterdir()) == [f"step_{step:07d}" for step in left]
