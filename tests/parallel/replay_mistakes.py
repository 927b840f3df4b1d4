"""The mistakes of routing replay, put in by hand on a rank whose tape is in place."""

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_rl.model.build import unwrap
from mcore_rl.parallel.routers import replayed_routers
from mcore_rl.replay.router_hooks import ChunkMicrobatch, ChunkRouters, RouterHook
from mcore_rl.train.state import TrainState


def stations(state: TrainState) -> list[ChunkRouters]:
    """Of the tape in place."""
    hooks = [router.router_replay for chunk in state.chunks for _, router in replayed_routers(chunk)]
    assert all(isinstance(hook, RouterHook) for hook in hooks)
    return list({id(hook._chunk_routers): hook._chunk_routers for hook in hooks}.values())


def arm_all_routers_of_the_process(state: TrainState) -> None:
    """Whichever chunk is armed last arms the others, whose recomputation then takes its routes."""
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
    """Nothing is switched after the forward: recomputation takes the routes of a later microbatch."""

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
    """Interleaved stages on two ranks whose messages to and fro are taken for each other."""
    for chunk in state.chunks:
        config = unwrap(chunk).config
        config.overlap_p2p_comm, config.batch_p2p_comm = False, True
