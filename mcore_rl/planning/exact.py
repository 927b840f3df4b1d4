"""Results of `mcore-rl plan --exact`, from mcore_rl/fake_world, compared with the closed forms."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from pydantic import TypeAdapter

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import Mixer
from mcore_rl.config.run import PlatformConfig
from mcore_rl.planning.activations import Layers
from mcore_rl.planning.memory import FP8_COPIES_BYTES, GIB, Memory
from mcore_rl.planning.messages import StageEvent, passes_of, play
from mcore_rl.planning.schedule import schedule
from mcore_rl.planning.simulate import ChunkTimes, Simulation, simulate_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes on one rank, counted."""

    rank: int
    stage: int
    weights: int
    """Bytes of weights and of buffers such as the routers', on the device, with the gaps between them."""
    gradients: int
    """Bytes of gradients, with the gaps between them."""
    optimizer: int
    """Bytes of the rank's share of the optimizer state."""
    gaps: int
    """Number of weights that would fill the gaps that DDP leaves so that ranks have equal shares."""
    gradient_gaps: int
    """Bytes of the gaps in the gradients."""
    numbers: int
    """Number of weights on the device."""
    host: int
    """Bytes of weights and optimizer states that wait in main memory."""
    host_optimizer: int
    """Bytes of main memory of offloaded optimizer states, and of the gradients that the processor reads."""

    def excess(self, planned: Memory, platform: PlatformConfig) -> dict[str, int]:
        """Return the bytes by which the closed form exceeds the counts, by part; it does not include gaps."""
        element = 2 if platform.precision == "bf16" else 4
        # TransformerEngine's 8-bit copies are not among the modules' weights.
        copies = FP8_COPIES_BYTES * self.numbers if platform.fp8 != "none" else 0
        return {
            "weights": planned.weights - copies - (self.weights - self.gaps * element),
            "gradients": planned.gradients - (self.gradients - self.gradient_gaps),
            "optimizer": planned.optimizer - self.optimizer,
            "main memory": planned.host + planned.host_optimizer - self.host - self.host_optimizer,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSaved:
    """Bytes of the activations that a layer keeps of some tokens."""

    is_moe: bool
    mixer: Mixer
    tokens: int
    """Number of tokens before tensor parallelism cuts them."""
    counted: int
    planned: int
    """Bytes by the closed form of the same layer."""


OF_MIXER: dict[Mixer, str] = {
    "delta": " with a delta net",
    "indexed": " with an indexer",
    "shared": " that shares a choice of keys",
}
"""Names of layers by their mixer."""
COUNTED_WITH = "as many experts as a token picks"
MAX_RECORDED = 20_000
"""Maximum number of passes of a recorded schedule; a longer schedule takes seconds, and repeats itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """Everything that was built, counted and recorded of a run."""

    ranks: list[RankBytes]
    layers: list[LayerSaved]
    """Each kind of layer, of our own layers."""
    schedule: list[list[StageEvent]]
    """Events of each pipeline stage in Megatron's schedule; empty without a pipeline."""


EXACT = TypeAdapter(Exact)
"""Writes and reads an Exact as JSON, between the process that counts and the process that shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSchedule:
    """Megatron's schedule of a mesh, played with the times of the plan, and the planned schedule."""

    num_microbatches: int
    differs: tuple[int, int] | None
    """Stage, and index among its passes, of the first pass that differs from the plan."""
    played: Simulation
    planned: Simulation


def recorded_microbatches(mesh: MeshConfig, num_microbatches: int) -> int:
    """Return the number of microbatches to record: all, or as many groups of them as MAX_RECORDED allows."""
    groups = MAX_RECORDED // (2 * mesh.vpp * mesh.pp * mesh.pp)
    return min(num_microbatches, max(groups, 4) * mesh.pp)


def recorded_schedule(
    stages: Sequence[Sequence[StageEvent]], mesh: MeshConfig, times: ChunkTimes
) -> RecordedSchedule:
    """Return a recorded schedule with the planned schedule.

    Raises:
        DeadlockError: Stages wait for each other.
        SwappedMessageError: A pass reads a message that was not made for it.
    """
    found = [passes_of(events) for events in stages]
    num_microbatches = len(found[0]) // (2 * mesh.vpp)
    planned = [schedule(mesh.pp, mesh.vpp, num_microbatches, stage) for stage in range(mesh.pp)]
    differing = (
        (stage, index)
        for stage in range(mesh.pp)
        for index, (one, other) in enumerate(zip_longest(found[stage], planned[stage]))
        if one != other
    )
    return RecordedSchedule(
        num_microbatches=num_microbatches,
        differs=next(differing, None),
        played=play(stages, times.of_pass, times.message_s),
        planned=simulate_mesh(times, mesh, num_microbatches),
    )


def schedule_lines(recorded: RecordedSchedule, num_microbatches: int, unit: str) -> Iterator[str]:
    """Yield lines about the recorded schedule; `unit` is the unit of its times."""
    what = f"{recorded.num_microbatches} microbatches"
    if recorded.num_microbatches < num_microbatches:
        what = f"{recorded.num_microbatches} of {num_microbatches} microbatches"
    yield (
        f"order   Megatron's own schedule, recorded on {len(recorded.played.busy_s)} stages with {what}: every message "
        "reaches the pass that it is for, and no stage waits for ever"
    )
    if recorded.differs is None:
        yield "        all passes come in the planned order"
    else:
        stage, index = recorded.differs
        yield f"        pass {index} of stage {stage} is not the planned one"
    played, planned = recorded.played, recorded.planned
    yield (
        f"        {played.seconds:.4g} {unit}, idle {played.bubble:.1%} of the busiest stage's time; the plan has "
        f"{planned.seconds:.4g} {unit}, {planned.bubble:.1%}"
    )
    if played.alive != planned.alive:
        yield f"        chunks alive by stage: {played.alive}, planned {planned.alive}"


def summary(exact: Exact, recorded: RecordedSchedule | None) -> dict[str, Any]:
    """Return the results as JSON values, without individual events."""
    order = None
    if recorded is not None:
        order = {
            "num_microbatches": recorded.num_microbatches,
            "as_planned": recorded.differs is None,
            "seconds": recorded.played.seconds,
            "bubble": recorded.played.bubble,
            "chunks_alive": recorded.played.alive,
        }
    return {
        "ranks": [asdict(rank) for rank in exact.ranks],
        "layers": [asdict(layer) for layer in exact.layers],
        "schedule": order,
    }


def exact_lines(exact: Exact, stages: list[Memory], platform: PlatformConfig) -> Iterator[str]:
    """Yield lines about the counts, and their differences from the closed forms."""
    yield "exact   built with Megatron's modules, DDP and optimizer, without their memory:"
    for built in exact.ranks:
        parts = {"weights": built.weights, "gradients": built.gradients, "optimizer": built.optimizer}
        if built.host + built.host_optimizer:
            parts["main memory"] = built.host + built.host_optimizer
        sizes = ", ".join(f"{name} {_size(size)}" for name, size in parts.items())
        agreement = _agreement(built, stages[built.stage], platform)
        yield f"        rank {built.rank}, stage {built.stage}: {sizes}: {agreement}"


def uncounted_lines(stages: Sequence[Memory]) -> Iterator[str]:
    """Yield the parts of the plan that were not built, and so remain closed forms, with their largest sizes."""
    sizes = {
        "the rollout's cache": max(stage.rollout_cache for stage in stages),
        "routes and router scores on the device": max(stage.routes for stage in stages),
        "routes and router scores in main memory": max(stage.host_routes for stage in stages),
        "logits": max(stage.logits for stage in stages),
    }
    parts = [f"{name} ({_size(size)})" for name, size in sizes.items() if size]
    if parts:
        yield f"        not built, as planned on the fullest stage: {', '.join(parts)}"


def layer_lines(layers: Sequence[LayerSaved], kind: Layers) -> Iterator[str]:
    """Yield the counted bytes that each kind of layer keeps; `kind` is the plan's kind of layers."""
    for layer in layers:
        name = "an MoE layer" if layer.is_moe else "a dense layer"
        name += OF_MIXER.get(layer.mixer, "")
        each = layer.counted / layer.tokens
        excess = layer.planned / layer.counted - 1
        yield (
            f"        {name} of ours keeps {each:,.0f} B a token on each rank, counted with {COUNTED_WITH}: the closed "
            f"form has {excess:+.1%}"
        )
    if layers and kind == "te":
        yield "        the plan takes TransformerEngine's layers, which cannot be counted without a GPU"


def _agreement(built: RankBytes, planned: Memory, platform: PlatformConfig) -> str:
    differing = {part: size for part, size in built.excess(planned, platform).items() if size}
    texts = [
        f"{abs(size):,} B {'more' if size > 0 else 'less'} for {part}" for part, size in differing.items()
    ]
    text = f"the closed form has {' and '.join(texts)}" if texts else "the closed form is equal to the byte"
    if built.gaps:
        # Ranks have equal shares of the buffers, and unequal ones of the weights in them.
        text += f"; not in it: gaps of {built.gaps:,} numbers, which give ranks equal shares of DDP's buffers"
    return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes > GIB // 10 else f"{num_bytes / 2**20:.2f} MiB"
