"""Known mistakes of routing replay, introduced on a rank whose tape is armed."""

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.model.build import unwrap
from mcore_rl.replay.router_hooks import ChunkMicrobatch, ChunkRouters, RouterHook
from mcore_rl.train.state import TrainState


def stations(state: TrainState) -> list[ChunkRouters]:
    """Return the routers of each chunk that the armed tape has hooks in."""
    hooks = [router.router_replay for chunk in state.chunks for _, router in replayed_routers(chunk)]
    assert all(isinstance(hook, RouterHook) for hook in hooks)
    return list({id(hook._chunk_routers): hook._chunk_routers for hook in hooks}.values())


def arm_all_routers_of_the_process(state: TrainState) -> None:
    """Let the chunk that is armed last arm all others: their recomputation takes its routes."""
    latest: list[ChunkMicrobatch] = []

    def arming(station: ChunkRouters) -> None:
        original = station.forward

        @contextmanager
        def forward(visit: ChunkMicrobatch) -> Iterator[None]:
            latest[:] = [visit]
            with original(visit):
                yield

        current = station.current
        station.forward = forward  # type: ignore[method-assign]
        station.current = lambda column: current(column) if station._in_forward else (latest[0], False)  # type: ignore[method-assign]

    for station in stations(state):
        arming(station)


def recompute_with_the_latest_forward(state: TrainState) -> None:
    """Switch nothing after the forward pass: recomputation takes the routes of a later microbatch."""

    def keeping(station: ChunkRouters) -> None:
        original = station.forward

        @contextmanager
        def forward(visit: ChunkMicrobatch) -> Iterator[None]:
            with original(visit):
                yield
            station._in_backward = visit

        station.forward = forward  # type: ignore[method-assign]
        station._begin_backward = lambda visit: None  # type: ignore[method-assign]

    for station in stations(state):
        keeping(station)


def batched_messages(state: TrainState) -> None:
    """Batch the messages of interleaved stages on two ranks: both directions are confused."""
    for chunk in state.chunks:
        config = unwrap(chunk).config
        config.overlap_p2p_comm, config.batch_p2p_comm = False, True
