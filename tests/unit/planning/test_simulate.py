"""The times of the planned schedule against closed forms; its order is compared with Megatron's in test_recorder.py."""

from itertools import pairwise

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.planning.schedule import chunks_in_flight, most_kept, schedule
from mcore_rl.planning.simulate import DeadlockError, simulate, simulate_mesh, timeline_svg, unit_times

SHAPES = ((4, 1, 8), (4, 1, 2), (8, 1, 8), (4, 2, 8), (4, 2, 4), (4, 4, 8), (8, 3, 16), (2, 2, 4))


def of_mesh(pp, vpp, num_microbatches, message_s=0.0, backward_s=2.0, overlap=None):
    passes = [schedule(pp, vpp, num_microbatches, stage) for stage in range(pp)]
    return simulate(
        passes,
        lambda kind, stage, chunk: (1.0 if kind == "F" else backward_s) / vpp,
        message_s,
        overlap=vpp > 1 if overlap is None else overlap,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_chunks_and_free_messages_give_the_bubble_and_the_chunks_of_the_closed_forms(shape):
    pp, vpp, num_microbatches = shape
    result = of_mesh(*shape)
    assert result.bubble == pytest.approx((pp - 1) / (num_microbatches * vpp + pp - 1))
    mesh = MeshConfig(pp=pp, vpp=vpp)
    assert result.alive == [chunks_in_flight(mesh, stage, num_microbatches) for stage in range(pp)]


@pytest.mark.parametrize("shape", [(4, 1, 8), (4, 2, 64), (2, 3, 30), (8, 4, 128)], ids=str)
def test_the_most_that_unequal_chunks_keep_is_that_of_the_whole_schedule(shape):
    pp, vpp, num_microbatches = shape
    kept = [3, 1, 4, 1][:vpp]
    events = of_mesh(*shape).events
    for stage in range(pp):
        now, all_of_them = 0, []
        for event in events:
            if event.stage == stage:
                now += kept[event.chunk] if event.kind == "F" else -kept[event.chunk]
                all_of_them.append(now)
        assert now == 0
        assert most_kept(MeshConfig(pp=pp, vpp=vpp), stage, num_microbatches, kept) == max(all_of_them)


def test_messages_are_not_free_and_more_of_them_is_never_faster():
    # Recorded from Megatron's 1F1B, whose stages wait for their messages: 0.345 where the formula says 0.304.
    assert of_mesh(8, 1, 16, 0.1).bubble == pytest.approx(0.345, abs=5e-4)
    assert of_mesh(8, 4, 16, 0.025).bubble == pytest.approx(0.124, abs=5e-4)
    seconds = [of_mesh(8, 1, 16, message_s).seconds for message_s in (0.0, 0.05, 0.1, 1.0)]
    assert seconds == sorted(seconds)


def test_a_stage_does_one_pass_at_a_time_and_every_pass_comes_after_what_it_needs():
    result = of_mesh(4, 3, 8, 0.01)
    ends = {(event.kind, event.stage, event.chunk, event.microbatch): event.end_s for event in result.events}
    assert len(ends) == 2 * 4 * 3 * 8
    for stage in range(4):
        own = [event for event in result.events if event.stage == stage]
        assert all(before.end_s <= after.start_s for before, after in pairwise(own))
    for event in result.events:
        if event.kind == "B":
            assert ends["F", event.stage, event.chunk, event.microbatch] <= event.start_s


def test_stages_that_wait_for_each_other_are_a_deadlock():
    # The second stage wants microbatch 1 first, and the first stage its gradient before it goes on.
    first = [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]
    second = [("F", 0, 1), ("B", 0, 1), ("F", 0, 0), ("B", 0, 0)]
    with pytest.raises(DeadlockError, match=r"stage 0 at .*stage 1 at"):
        simulate([first, second], lambda *_: 1.0)


def test_a_longer_last_stage_keeps_the_others_waiting():
    model = ModelConfig(num_layers=10)
    mesh = MeshConfig(pp=4, first_stage_layers=2, last_stage_layers=4)
    result = simulate_mesh(unit_times(model, mesh), mesh, 16)
    assert result.busy_s == [96, 96, 96, 192]
    # Each of the others once forwards before the last one begins, and once backwards after it.
    assert result.seconds == 192 + 3 * 2 * 3


def test_the_picture_has_every_pass_in_the_row_of_its_stage():
    result = of_mesh(4, 2, 8)
    picture = timeline_svg(result, "pp 4 x vpp 2")
    assert picture.startswith("<svg") and picture.count("<title>") == len(result.events) == 128
    assert all(f">stage {stage}<" in picture for stage in range(4))
    assert "idle 15.8% of" in picture
