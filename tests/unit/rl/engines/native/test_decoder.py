"""Copies between slots, a run of targets at a time."""

import random

from mcore_rl.rl.engines.native.decoder import copied_runs
from mcore_rl.rl.engines.native.scheduler import Copy


def test_a_prompt_is_copied_to_its_group_at_once() -> None:
    copies = [Copy(0, 1, 5), Copy(0, 2, 5), Copy(0, 3, 5), Copy(4, 5, 5), Copy(4, 7, 5), Copy(4, 8, 6)]
    assert list(copied_runs(copies)) == [
        (0, slice(1, 4), 5),
        (4, slice(5, 6), 5),
        (4, slice(7, 8), 5),
        (4, slice(8, 9), 6),
    ]


def test_runs_leave_in_the_slots_what_one_copy_after_the_other_does() -> None:
    choice = random.Random(0)
    for _ in range(300):
        copies = []
        for _ in range(choice.randint(0, 6)):
            source, target = choice.sample(range(5), 2)
            copies.append(Copy(source, target, choice.randint(1, 2)))
        one_by_one, in_runs = ([[slot] * 2 for slot in range(5)] for _ in range(2))
        for copy in copies:
            one_by_one[copy.target][: copy.length] = one_by_one[copy.source][: copy.length]
        for source, targets, length in copied_runs(copies):
            held = in_runs[source][:length]
            for target in range(targets.start, targets.stop):
                in_runs[target][:length] = held
        assert in_runs == one_by_one
