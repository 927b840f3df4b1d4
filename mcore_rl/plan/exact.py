"""Results of `mcore-rl plan --exact` beside the closed forms: what mcore_rl/fake_world built, counted and recorded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.run import PlatformConfig
from mcore_rl.plan.memory import FP8_COPIES_BYTES, GIB, GRADIENT_BYTES, Memory


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
    """Number of weights that would fill the gaps which DDP leaves so that ranks have equal shares."""
    numbers: int
    """Number of weights on the device."""
    host: int
    """Bytes of weights that wait in main memory."""

    def excess(self, planned: Memory, platform: PlatformConfig) -> dict[str, int]:
        """Return the bytes that the closed form has more than were counted, by part; it knows nothing of gaps."""
        element = 2 if platform.precision == "bf16" else 4
        # TransformerEngine's copies in 8 bits are no weights of the modules.
        copies = FP8_COPIES_BYTES * self.numbers if platform.fp8 != "none" else 0
        return {
            "weights": planned.weights - copies - (self.weights - self.gaps * element),
            "gradients": planned.gradients - (self.gradients - self.gaps * GRADIENT_BYTES),
            "optimizer": planned.optimizer - self.optimizer,
            "main memory": planned.host - self.host,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """Everything that was built, counted and recorded of a run."""

    ranks: list[RankBytes]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Exact":
        """Return what `dataclasses.asdict` turned into JSON values."""
        return cls(ranks=[RankBytes(**rank) for rank in values["ranks"]])


def exact_lines(exact: Exact, stages: list[Memory], platform: PlatformConfig) -> Iterator[str]:
    """Yield what was built and counted, and how much the closed forms differ from it."""
    yield "exact   built with Megatron's modules, DDP and optimizer, without their memory:"
    for built in exact.ranks:
        parts = {"weights": built.weights, "gradients": built.gradients, "optimizer": built.optimizer}
        sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        agreement = _agreement(built, stages[built.stage], platform)
        yield f"        rank {built.rank}, stage {built.stage}: {sizes} GiB: {agreement}"


def _agreement(built: RankBytes, planned: Memory, platform: PlatformConfig) -> str:
    differing = {part: size for part, size in built.excess(planned, platform).items() if size}
    gaps = ""
    if built.gaps:
        gaps = f", without the gaps between them, which are {built.gaps:,} numbers long"
    if not differing:
        return f"the closed form is equal to the byte{gaps}"
    texts = [
        f"{abs(size):,} B {'more' if size > 0 else 'less'} for {part}" for part, size in differing.items()
    ]
    return f"the closed form has {' and '.join(texts)}{gaps}"
