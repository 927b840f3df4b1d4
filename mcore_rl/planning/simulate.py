"""When every forward and backward pass of a step happens: Megatron's pipeline schedules, played through in seconds.

The order of passes on each stage is planning/schedule.py's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.planning.parts import Workload, all_layer_times, output_times
from mcore_rl.planning.schedule import Kind, Pass, schedule
from mcore_rl.planning.step import message_seconds
from mcore_rl.planning.weights import layers_by_chunk

MAX_PASSES = 300_000
"""Maximum number of passes of a schedule that is simulated; longer schedules take seconds."""


class DeadlockError(ConfigError):
    """Stages wait for each other."""


@dataclass(frozen=True, slots=True)
class Event:
    """A pass on a stage, in seconds from the start of the step."""

    stage: int
    kind: Kind
    chunk: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Result of a simulation."""

    seconds: float
    busy_s: list[float]
    """Seconds of computation of each stage."""
    alive: list[int]
    """Largest number of chunks, on each stage, that wait for their backward pass."""
    events: list[Event]

    @property
    def bubble(self) -> float:
        """Fraction of the time in which the busiest stage computes nothing."""
        return 1 - max(self.busy_s) / self.seconds


def simulate(
    passes: Sequence[Sequence[Pass]],
    seconds_of: Callable[[Kind, int, int], float],
    message_s: float = 0.0,
    *,
    overlap: bool = False,
) -> Simulation:
    """Return when each pass happens: after the pass before it on its stage, and after the pass that makes its input.

    Args:
        passes: Passes of each stage, in order.
        seconds_of: Seconds of a pass by kind, stage and chunk.
        message_s: Seconds of a message between two stages.
        overlap: Whether messages travel during the computation; if not, both stages wait for them.

    Raises:
        DeadlockError: A stage waits for a pass that never comes.
    """
    pp = len(passes)
    vpp = 1 + max(chunk for stage in passes for _, chunk, _ in stage)
    last = pp * vpp - 1
    ends: dict[tuple[Kind, int, int], float] = {}
    clocks, busy, alive, most = [0.0] * pp, [0.0] * pp, [0] * pp, [0] * pp
    position, events = [0] * pp, []
    waiting = True
    while waiting:
        moved = False
        for stage in range(pp):
            for kind, chunk, microbatch in passes[stage][position[stage] :]:
                place = chunk * pp + stage
                before = _before(kind, place, last)
                ready = 0.0
                if before is not None:
                    source = ends.get((*before, microbatch))
                    if source is None:
                        break
                    # A backward pass of the last chunk begins from its own output, without a message.
                    travels = message_s if before[1] != place and pp > 1 else 0.0
                    ready = source + travels
                start = max(clocks[stage], ready)
                end = start + seconds_of(kind, stage, chunk)
                sends = not overlap and pp > 1 and (place < last if kind == "F" else place > 0)
                ends[kind, place, microbatch] = end
                busy[stage] += end - start
                clocks[stage] = end + (message_s if sends else 0.0)
                alive[stage] += 1 if kind == "F" else -1
                most[stage] = max(most[stage], alive[stage])
                events.append(Event(stage, kind, chunk, microbatch, start, end))
                position[stage] += 1
                moved = True
        waiting = any(position[stage] < len(passes[stage]) for stage in range(pp))
        if waiting and not moved:
            stuck = [
                f"stage {stage} at {passes[stage][position[stage]]}"
                for stage in range(pp)
                if position[stage] < len(passes[stage])
            ]
            raise DeadlockError(f"Stages wait for each other: {', '.join(stuck)}.")
    return Simulation(seconds=max(event.end_s for event in events), busy_s=busy, alive=most, events=events)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTimes:
    """Seconds of the passes of every model chunk, and of a message between two stages."""

    seconds: dict[tuple[int, int], tuple[float, float]]
    """Forward and backward pass of a microbatch, by stage and chunk."""
    message_s: float

    def of_pass(self, kind: Kind, stage: int, chunk: int) -> float:
        """Return the seconds of a pass."""
        return self.seconds[stage, chunk][kind == "B"]


def step_times(work: Workload) -> ChunkTimes:
    """Return the seconds of every chunk."""
    layers = {kind: (layer.forward, layer.backward) for kind, layer in all_layer_times(work).items()}
    return _chunk_times(work.model, work.mesh, layers, output_times(work), message_seconds(work))


def unit_times(model: ModelConfig, mesh: MeshConfig) -> ChunkTimes:
    """Return times for an unknown device: a layer takes 1 second forwards and 2 backwards."""
    return _chunk_times(model, mesh, dict.fromkeys(model.all_kinds, (1.0, 2.0)), (0.0, 0.0), 0.0)


def simulate_mesh(times: ChunkTimes, mesh: MeshConfig, num_microbatches: int) -> Simulation:
    """Return the schedule of this many microbatches on a mesh."""
    passes = [schedule(mesh.pp, mesh.vpp, num_microbatches, stage) for stage in range(mesh.pp)]
    return simulate(passes, times.of_pass, times.message_s, overlap=mesh.vpp > 1 and mesh.overlap_p2p)


def _chunk_times(
    model: ModelConfig,
    mesh: MeshConfig,
    layers: Mapping[LayerKind, tuple[float, float]],
    output: tuple[float, float],
    message_s: float,
) -> ChunkTimes:
    """Return the times of a mesh with layers that take `layers[kind]` seconds forwards and backwards."""
    kinds, last = model.layer_kinds, (mesh.pp - 1, mesh.vpp - 1)
    seconds: dict[tuple[int, int], tuple[float, float]] = {}
    for stage, chunks in enumerate(layers_by_chunk(model, mesh)):
        for chunk, indices in enumerate(chunks):
            times = [layers[kinds[index]] for index in indices]
            if (stage, chunk) == last:
                times += [output] * (1 + model.mtp_layers) + [layers[model.mtp_kind]] * model.mtp_layers
            seconds[stage, chunk] = (sum(time[0] for time in times), sum(time[1] for time in times))
    return ChunkTimes(seconds=seconds, message_s=message_s if mesh.pp > 1 else 0.0)


def _before(kind: Kind, place: int, last: int) -> tuple[Kind, int] | None:
    """Return the pass that makes a pass's input, by kind and position in the model; None for the first."""
    if kind == "F":
        return ("F", place - 1) if place else None
    return ("B", place + 1) if place < last else ("F", place)


def timeline_svg(simulation: Simulation, title: str) -> str:
    """Return a picture of a simulation: a row for each stage, a rectangle for each pass, darker for later chunks."""
    stages = len(simulation.busy_s)
    chunks = 1 + max(event.chunk for event in simulation.events)
    row, left, top, width = 24, 70, 34, 1100
    scale = width / simulation.seconds
    height = top + row * stages + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20">{title}</text>',
    ]
    lines += [f'<text x="8" y="{top + row * stage + 16}">stage {stage}</text>' for stage in range(stages)]
    for event in simulation.events:
        depth = (event.chunk + 1) / (chunks + 1)
        light = round(82 - 44 * depth)
        hue = 211 if event.kind == "F" else 28
        x, size = left + event.start_s * scale, (event.end_s - event.start_s) * scale
        y = top + row * event.stage
        lines.append(
            f'<rect x="{x:.2f}" y="{y}" width="{size:.2f}" height="{row - 3}" fill="hsl({hue},70%,{light}%)" '
            f'stroke="white" stroke-width="0.5"><title>{event.kind} chunk {event.chunk} microbatch '
            f"{event.microbatch}: {event.start_s:.4g}-{event.end_s:.4g} s</title></rect>"
        )
    axis = top + row * stages + 16
    ticks = [index / 5 * simulation.seconds for index in range(6)]
    lines += [f'<text x="{left + tick * scale:.1f}" y="{axis}">{tick:.3g} s</text>' for tick in ticks]
    lines.append(
        f'<text x="{left}" y="{axis + 18}">blue: forward, orange: backward, darker: later chunks of the stage; idle '
        f"{simulation.bubble:.1%} of the busiest stage's time</text>"
    )
    return "\n".join([*lines, "</svg>\n"])
