"""The schedule against Megatron's own, and its times against closed forms."""

from itertools import pairwise

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.fake_world.groups import fake_rank
from mcore_rl.plan.schedule import chunks_in_flight, most_kept, schedule
from mcore_rl.plan.simulate import DeadlockError, simulate, simulate_units, timeline_svg
from tests.ranks import run_ranks

SHAPES = ((4, 1, 8), (4, 1, 2), (8, 1, 8), (4, 2, 8), (4, 2, 4), (4, 4, 8), (8, 3, 16), (2, 2, 4))
RECORDED = ((4, 1, 8), (4, 1, 2), (4, 2, 8), (4, 2, 4), (2, 3, 6))


class Silent(P2PCommunicator):
    """Sends nothing; a message is a tensor of one element."""

    def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, **rest):
        received = [
            torch.zeros(1, requires_grad=True) if wanted else None for wanted in (recv_prev, recv_next)
        ]
        return *received, None if rest.get("wait_on_reqs", True) else {}


class Chunk(torch.nn.Module):
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config):
        super().__init__()
        self.config = config

    def set_input_tensor(self, tensor):
        pass


def recorded(pp, vpp, num_microbatches, stage):
    """Kinds and chunks of what Megatron's schedule does on a stage, in order."""
    passes = []
    with fake_rank(MeshConfig(pp=pp, vpp=vpp), stage, pp):
        config = TransformerConfig(
            num_layers=pp * vpp, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, pipeline_dtype=torch.float32,
            overlap_p2p_comm=vpp > 1, batch_p2p_comm=vpp == 1, deallocate_pipeline_outputs=False,
        )  # fmt: skip
        chunks = [Chunk(config) for _ in range(vpp)]

        def forward_step(step, data, model, *args, **kwargs):
            passes.append(("F", chunks.index(model)))
            return torch.zeros(1, requires_grad=True), torch.tensor(0)

        def backward_step(*args, **kwargs):
            passes.append(("B", None))
            return torch.zeros(1)

        schedules.forward_step, schedules.backward_step = forward_step, backward_step
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.embd = groups.pos_embd = None
        schedules.get_forward_backward_func()(
            forward_step_func=None, data_iterator=[iter(())] * vpp, model=chunks, num_microbatches=num_microbatches,
            seq_length=8, micro_batch_size=1, forward_only=False, p2p_communicator=Silent(groups.pp, config),
            pg_collection=groups,
        )  # fmt: skip
    return passes


def all_recorded():
    return {shape: [recorded(*shape, stage) for stage in range(shape[0])] for shape in RECORDED}


def of_mesh(pp, vpp, num_microbatches, message_s=0.0, backward_s=2.0, overlap=None):
    passes = [schedule(pp, vpp, num_microbatches, stage) for stage in range(pp)]
    return simulate(
        passes,
        lambda kind, stage, chunk: (1.0 if kind == "F" else backward_s) / vpp,
        message_s,
        overlap=vpp > 1 if overlap is None else overlap,
    )


@pytest.fixture(scope="module")
def megatron():
    return run_ranks(all_recorded, 1)[0]


@pytest.mark.parametrize("shape", RECORDED, ids=str)
def test_the_order_of_passes_is_megatrons(megatron, shape):
    for stage in range(shape[0]):
        planned = schedule(*shape, stage)
        found = megatron[shape][stage]
        assert [kind for kind, _, _ in planned] == [kind for kind, _ in found]
        forwards = [chunk for kind, chunk, _ in planned if kind == "F"]
        assert forwards == [chunk for kind, chunk in found if kind == "F"]


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
    result = simulate_units(model, mesh, 16)
    assert result.busy_s == [96, 96, 96, 192]
    # Each of the others once forwards before the last one begins, and once backwards after it.
    assert result.seconds == 192 + 3 * 2 * 3


def test_the_picture_has_every_pass_in_the_row_of_its_stage():
    result = of_mesh(4, 2, 8)
    picture = timeline_svg(result, "pp 4 x vpp 2")
    assert picture.startswith("<svg") and picture.count("<title>") == len(result.events) == 128
    assert all(f">stage {stage}<" in picture for stage in range(4))
    assert "idle 15.8% of" in picture
