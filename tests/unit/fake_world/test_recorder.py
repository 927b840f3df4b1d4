"""Megatron's own schedules, recorded stage by stage, against the planned ones and closed forms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.fake_world.recorder import record
from mcore_rl.planning.exact import EXACT, Exact, recorded_schedule
from mcore_rl.planning.messages import (
    Compute,
    Message,
    Post,
    SwappedMessageError,
    Wait,
    passes_of,
    play,
)
from mcore_rl.planning.schedule import chunks_in_flight, schedule
from mcore_rl.planning.simulate import ChunkTimes, DeadlockError, simulate
from tests.ranks import run_ranks

SHAPES = (
    (4, 1, 8), (4, 1, 2), (8, 1, 8), (8, 1, 4), (8, 1, 16), (4, 2, 8), (4, 2, 4), (4, 4, 8), (8, 3, 16), (8, 4, 16),
    (2, 2, 4), (2, 3, 6),
)  # fmt: skip


def all_recorded(shapes):
    return {shape: record(MeshConfig(pp=shape[0], vpp=shape[1]), shape[2]) for shape in shapes}


@pytest.fixture(scope="module")
def recorded():
    return run_ranks(all_recorded, 1, SHAPES)[0]


def played(stages, vpp, message_s=0.0):
    return play(stages, lambda kind, *_: (1.0 if kind == "F" else 2.0) / vpp, message_s)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_order_of_passes_is_the_planned_one_and_the_bubble_that_of_the_closed_form(recorded, shape):
    pp, vpp, num_microbatches = shape
    stages = recorded[shape]
    assert [passes_of(events) for events in stages] == [schedule(*shape, stage) for stage in range(pp)]
    result = played(stages, vpp)
    assert result.bubble == pytest.approx((pp - 1) / (num_microbatches * vpp + pp - 1))
    mesh = MeshConfig(pp=pp, vpp=vpp)
    assert result.alive == [chunks_in_flight(mesh, stage, num_microbatches) for stage in range(pp)]


@pytest.mark.parametrize("shape", [(4, 1, 8), (8, 4, 16)], ids=str)
def test_each_pass_reads_the_message_of_the_chunk_before_it(recorded, shape):
    pp, vpp, num_microbatches = shape
    reads = [
        sum(event.message is not None for event in events if isinstance(event, Compute))
        for events in recorded[shape]
    ]
    # All but the first chunk's forward passes and the last chunk's backward passes.
    assert sum(reads) == 2 * num_microbatches * (pp * vpp - 1)


def test_messages_take_the_time_that_the_planned_order_gives_them(recorded):
    assert played(recorded[8, 1, 16], 1, 0.1).bubble == pytest.approx(0.345, abs=5e-4)
    assert played(recorded[8, 4, 16], 4, 0.025).bubble == pytest.approx(0.124, abs=5e-4)
    for shape in ((8, 1, 16), (4, 2, 8)):
        seconds = [
            played(recorded[shape], shape[1], message_s).seconds for message_s in (0.0, 0.05, 0.1, 1.0, 7.0)
        ]
        assert seconds == sorted(seconds)


def test_passes_that_are_not_the_planned_ones_are_named(recorded):
    times = ChunkTimes(seconds={(stage, 0): (1.0, 2.0) for stage in range(4)}, message_s=0.0)
    assert recorded_schedule(recorded[4, 1, 8], MeshConfig(pp=4), times).differs is None
    swapped = [list(events) for events in recorded[4, 1, 8]]
    first, second = (
        index
        for index, event in enumerate(swapped[3])
        if isinstance(event, Compute) and event.microbatch == 7
    )
    swapped[3][first], swapped[3][second] = swapped[3][second], swapped[3][first]
    assert recorded_schedule(swapped, MeshConfig(pp=4), times).differs == (3, 14)


def test_forward_passes_alone_are_recorded_too():
    stages = run_ranks(forward_only, 1)[0]
    assert [passes_of(events) for events in stages] == [
        [("F", chunk, 4 * group + index) for group in range(2) for chunk in range(2) for index in range(4)]
    ] * 4
    result = played(stages, 1)
    assert result.seconds == 8 * 2 + 3 and result.alive == [16] * 4


def forward_only():
    return record(MeshConfig(pp=4, vpp=2), 8, backward=False)


def test_two_stages_that_do_not_overlap_their_messages_take_one_for_another():
    # The trap that checks/ refuses: mesh.vpp > 1 with pp = 2 needs overlap_p2p.
    with pytest.raises(
        SwappedMessageError, match=r"gradient of microbatch 0 .* for the activation of microbatch 2"
    ):
        played(run_ranks(without_overlap, 1)[0], 2)


def without_overlap():
    return record(MeshConfig(pp=2, vpp=2, overlap_p2p=False), 4)


def test_microbatches_that_megatron_refuses_are_refused_here():
    with pytest.raises(AssertionError, match="remainder of M"):
        run_ranks(record, 1, MeshConfig(pp=4, vpp=2), 6)


def both_send_first():
    """Two stages that each send before they receive, and whose messages share a queue."""
    made = ("F", 0, 0)
    return [
        [
            Compute("F", 0, 0, None),
            Post((Message(0, True, 1 - stage, False, made),), False),
            Post((Message(1, False, 1 - stage, False, None),), False),
            Wait((1,)),
        ]
        for stage in range(2)
    ]


def test_two_stages_that_both_send_first_wait_for_each_other():
    with pytest.raises(
        DeadlockError, match="stage 0 at a receive from stage 1, stage 1 at a receive from stage 0"
    ):
        play(both_send_first(), lambda *_: 1.0)
    # As a batch, the two messages begin together.
    batches = [
        [events[0], Post((*events[1].messages, *events[2].messages), True), events[3]]
        for events in both_send_first()
    ]
    assert play(batches, lambda *_: 1.0, 0.5).seconds == 1.0


@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from(SHAPES), data=st.data())
def test_whatever_chunks_take_no_message_arrives_before_it_is_sent(recorded, shape, data):
    pp, vpp, _ = shape
    seconds = st.floats(0.01, 10.0)
    times = {
        (kind, stage, chunk): data.draw(seconds)
        for kind in "FB"
        for stage in range(pp)
        for chunk in range(vpp)
    }
    message_s = data.draw(st.floats(0.0, 1.0))
    result = play(recorded[shape], lambda *one: times[one], message_s)
    free = simulate([passes_of(events) for events in recorded[shape]], lambda *one: times[one])
    # A send ends with its receive, so that a stage may wait for one that is late; never the other way round.
    assert result.seconds >= free.seconds * (1 - 1e-9)
    assert result.busy_s == pytest.approx(free.busy_s) and result.alive == free.alive
    ends = {(one.kind, one.chunk * pp + one.stage, one.microbatch): one for one in result.events}
    for (kind, place, microbatch), one in ends.items():
        before = ends.get((kind, place - 1 if kind == "F" else place + 1, microbatch))
        if before is not None:
            assert one.start_s >= before.end_s + message_s - 1e-9


def test_events_survive_json(recorded):
    found = Exact(ranks=[], layers=[], schedule=recorded[4, 2, 4])
    assert EXACT.validate_json(EXACT.dump_json(found)) == found
