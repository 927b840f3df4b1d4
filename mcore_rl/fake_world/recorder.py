"""A recorder of Megatron's pipeline schedules: passes, messages and waits of every stage, in order.

Each stage is a fake rank with chunks that compute nothing. They go through `run_pass`, Megatron's own schedule and
torch's autograd; torch's sends and receives are replaced. A tensor carries the number of the pass that made it, or of
the message that it came with, so that the use of a message is observed and not assumed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.fake_world.groups import fake_rank
from mcore_rl.megatron.schedule import HeadOutput, run_pass
from mcore_rl.planning.messages import Compute, Message, Post, StageEvent, Wait
from mcore_rl.planning.schedule import Kind, Pass

WIDTH = 8
NOTHING = -1.0
"""Value of a tensor that no message brought and no pass made."""


def record(mesh: MeshConfig, num_microbatches: int, *, backward: bool = True) -> list[list[StageEvent]]:
    """Return the actions of every stage of a mesh of stages in one pass over the microbatches, as Megatron's schedule
    has it.

    Raises:
        Exception: Megatron's own, for numbers of microbatches that its schedules do not accept.
    """
    stages = MeshConfig(pp=mesh.pp, vpp=mesh.vpp, overlap_p2p=mesh.overlap_p2p)
    return [_record_stage(stages, stage, num_microbatches, backward) for stage in range(mesh.pp)]


def _record_stage(mesh: MeshConfig, stage: int, num_microbatches: int, backward: bool) -> list[StageEvent]:
    overlap = mesh.vpp > 1 and mesh.overlap_p2p
    with fake_rank(mesh, stage, mesh.pp):
        config = TransformerConfig(
            num_layers=mesh.pp * mesh.vpp,
            hidden_size=WIDTH,
            num_attention_heads=1,
            pipeline_model_parallel_size=mesh.pp,
            virtual_pipeline_model_parallel_size=mesh.vpp if mesh.vpp > 1 else None,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=overlap,
            batch_p2p_comm=not overlap,
            deallocate_pipeline_outputs=False,
            calculate_per_token_loss=True,
        )
        recorder = _Recorder()
        chunks = [_Chunk(config, chunk, recorder) for chunk in range(mesh.vpp)]
        microbatches = [_Microbatch(index) for index in range(num_microbatches)]
        with _recorded_messages(recorder):
            run_pass(chunks, microbatches, _Head(), backward=backward)
    return recorder.events


@dataclass(slots=True)
class _Recorder:
    """Events of a stage so far."""

    events: list[StageEvent] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    num_messages: int = 0

    def compute(self, kind: Kind, chunk: int, microbatch: int, source: Tensor) -> float:
        """Note a pass that reads `source`, and return the value of the tensors that it makes."""
        value = source.flatten()[0].item()
        # Values below NOTHING stand for messages.
        message = round(NOTHING - 1 - value) if value < NOTHING else None
        self.passes.append((kind, chunk, microbatch))
        self.events.append(Compute(kind, chunk, microbatch, message))
        return float(len(self.passes) - 1)

    def post(self, operations: Sequence["_Operation"], *, is_batch: bool) -> "_Request":
        """Note sends and receives that begin together."""
        messages = []
        for operation in operations:
            made_by = None
            if operation.is_send:
                made_by = self.passes[round(operation.tensor.flatten()[0].item())]
            else:
                operation.tensor.data.fill_(NOTHING - 1 - self.num_messages)
            world = operation.group is dist.group.WORLD
            messages.append(Message(self.num_messages, operation.is_send, operation.peer, world, made_by))
            self.num_messages += 1
        self.events.append(Post(tuple(messages), is_batch))
        return _Request(self, tuple(message.index for message in messages))


@dataclass(frozen=True, slots=True)
class _Request:
    """Replacement for torch's handle of messages."""

    recorder: _Recorder
    messages: tuple[int, ...]

    def wait(self) -> None:
        """Note that the stage waits at this point."""
        self.recorder.events.append(Wait(self.messages))


class _Operation:
    """Replacement for `torch.distributed.P2POp`."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Any = None) -> None:
        self.is_send: bool = op.is_send
        self.tensor, self.peer, self.group = tensor, peer, group


class _Alone:
    """Replacement for `isend` or `irecv`."""

    def __init__(self, recorder: _Recorder, *, is_send: bool) -> None:
        self.recorder, self.is_send = recorder, is_send

    def __call__(self, tensor: Tensor, *args: int, group: Any = None, **peer: int) -> _Request:
        (other,) = (*args, *peer.values())
        return self.recorder.post([_Operation(self, tensor, other, group)], is_batch=False)


@contextmanager
def _recorded_messages(recorder: _Recorder) -> Iterator[None]:
    """Replace torch's sends and receives between two ranks."""
    functions: Any = dist  # Megatron looks these up by name
    names = ("isend", "irecv", "P2POp", "batch_isend_irecv")
    originals = {name: getattr(functions, name) for name in names}
    functions.isend, functions.irecv = _Alone(recorder, is_send=True), _Alone(recorder, is_send=False)
    functions.P2POp = _Operation
    functions.batch_isend_irecv = lambda operations: [recorder.post(operations, is_batch=True)]
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(functions, name, original)


class _Chunk(nn.Module):
    """A model chunk that notes its passes."""

    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False

    def __init__(self, config: TransformerConfig, chunk: int, recorder: _Recorder) -> None:
        super().__init__()
        self.config, self.chunk, self.recorder = config, chunk, recorder
        self.received: Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        """Take the tensor from the stage before; Megatron calls it before each forward pass."""
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, microbatch: int) -> Tensor:
        """Return a tensor with the number of this pass."""
        source = self.received
        if source is None:
            source = torch.full((1, 1, WIDTH), NOTHING, requires_grad=True)
        output: Tensor = _Noted.apply(source, self.recorder, self.chunk, microbatch)  # type: ignore[no-untyped-call]
        return output


class _Noted(torch.autograd.Function):
    """Passes of a chunk on a microbatch."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, recorder: _Recorder, chunk: int, microbatch: int) -> Tensor:
        """Note the forward pass."""
        ctx.noted = recorder, chunk, microbatch
        return torch.full_like(source, recorder.compute("F", chunk, microbatch, source))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Note the backward pass."""
        recorder, chunk, microbatch = ctx.noted
        (gradient,) = gradients
        made = recorder.compute("B", chunk, microbatch, gradient)
        return torch.full_like(gradient, made), None, None, None


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """A microbatch without tokens."""

    index: int
    shape: tuple[int, int] = (1, 1)
    routed_tokens: int = 1
    packed_spans: None = None

    def model_inputs(self, *, with_labels: bool) -> dict[str, Any]:
        """Return the index, by which the chunks know it."""
        return {"microbatch": self.index}


class _Head:
    """Head with a gradient that is not the number of a message."""

    wants_losses = False

    def count(self, microbatch: _Microbatch) -> Tensor:
        """Return one token."""
        return torch.ones((), dtype=torch.int64)

    def __call__(self, microbatch: _Microbatch, output: Tensor) -> HeadOutput:
        """Return a sum."""
        return HeadOutput(loss=output.sum(), count=self.count(microbatch), outputs={})
